"""What the documentation promises and can be checked without reading it: links, metrics, settings."""

import re
from pathlib import Path

import pytest

from common.config import SERVICES
from common.config_sources import keys_of
from common.observability.metrics import GatewayMetrics, RouterMetrics, ServiceMetrics, WorkerMetrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


@pytest.mark.parametrize(
    "metrics",
    [GatewayMetrics("g"), RouterMetrics("r"), WorkerMetrics("p", "prefill")],
    ids=lambda m: type(m).__name__,
)
def test_every_metric_is_explained(metrics: ServiceMetrics) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    names = re.findall(
        r"^# TYPE galley_(?:requests(?=_[a-z]+ gauge))?(\w+)", metrics.exposition().decode(), re.M
    )
    assert names
    assert [name for name in names if name not in text] == []


def test_variables_of_the_environment_are_settings() -> None:
    known = {key.upper().replace(".", "__") for cls in SERVICES.values() for key in keys_of(cls)}
    known |= {"KEY", "SOME_KEY"}  # placeholders
    for page in PAGES:
        assert set(re.findall(r"\bGALLEY_([A-Z_]+[A-Z])", page.read_text())) <= known, page


CASES = (
    *("A01", "A03", "A05", "A07", "A08", "A09"),
    *("B11", "B12", "B13", "B14", "B15", "B16", "B18", "B19", "B20", "B21", "B23", "B27", "B64"),
    *("C24", "C26", "C32"),
    *("D06", "D65", "D66", "D67", "D68", "D69", "D70"),
)


def test_every_case_has_tests_and_they_exist() -> None:
    rows = re.findall(r"^\| [A-Z]\d\d \|.*", (ROOT / "docs" / "cases.md").read_text(), re.M)
    assert tuple(row[2:5] for row in rows) == CASES
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
