// The official Node client against a running gateway: node openai_client.mjs BASE_URL MODEL SCHEMAS
// SCHEMAS is a file of named JSON schemas. Prints one line of JSON with what each way of asking gave.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model, schemasFile] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const limits = { temperature: 0, max_tokens: 12 };
const messages = [{ role: "user", content: "Name a colour. 삼겹살 👩‍👩‍👧" }];

const whole = await client.chat.completions.create({ model, messages, ...limits });

let streamed = "";
let finish = [];
let usage = null;
const chunks = await client.chat.completions.create({
  model,
  messages,
  ...limits,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.choices[0]?.finish_reason) finish.push(chunk.choices[0].finish_reason);
  usage = chunk.usage ?? usage;
}

const helper = client.chat.completions.stream({ model, messages, ...limits });
let helped = "";
helper.on("content", (delta) => (helped += delta));
const helpedWhole = await helper.finalContent();

const asked = { model, input: messages[0].content, temperature: 0, max_output_tokens: 12 };
const response = await client.responses.create(asked);

let told = "";
const types = [];
let last = null;
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.output_text.delta") told += event.delta;
  if (types.at(-1) !== event.type) types.push(event.type);
  last = event;
}

const responseHelper = client.responses.stream(asked);
const responseHelped = (await responseHelper.finalResponse()).output_text;

const schemas = Object.entries(JSON.parse(readFileSync(schemasFile, "utf8")));
const structured = await Promise.all(
  schemas.map(async ([name, schema], seed) => {
    const { choices } = await client.chat.completions.create({
      model,
      messages: [{ role: "user", content: "Describe a person or a place as JSON." }],
      max_tokens: 300,
      seed,
      response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    });
    return { name, content: choices[0].message.content, finish: choices[0].finish_reason };
  }),
);

const listed = (await client.models.list()).data.map((one) => one.id);
const retrieved = (await client.models.retrieve(model)).id;

let refusal = null;
try {
  await client.chat.completions.create({ model, messages, temperature: 3 });
} catch (error) {
  refusal = { status: error.status, param: error.param, type: error.constructor.name };
}

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    wholeUsage: whole.usage,
    streamed,
    finish,
    usage,
    helped,
    helpedWhole,
    response: response.output_text,
    responseHelped,
    told,
    types,
    final: last.response.output[0].content[0].text,
    status: last.response.status,
    structured,
    models: [...listed, retrieved],
    refusal,
  }),
);
