"""What a reader sees of cells and duels, within eighty columns."""

from rich.console import Console

from bench.engine.cells import Ceilings, Decode, Measured, Prefill
from bench.engine.rivals import BatchCell, Duel
from bench.engine.tables import cells_table, duels_table
from tests.unit.bench.engine.test_cells import SMOLLM2


def shown(table: object) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_a_cell_is_one_line_beside_its_bound() -> None:
    machine = Ceilings(10e9, 1e12)
    cells = [
        Measured(Prefill(2048), ours_s=1.7894, plain_s=3.08, ceilings=machine, shape=SMOLLM2),
        Measured(Decode(8, 256), ours_s=0.0632431872, plain_s=0.1, ceilings=machine, shape=SMOLLM2),
    ]
    lines = shown(cells_table(cells))
    [prefill] = [line for line in lines if "prefill 2048" in line]
    [decode] = [line for line in lines if "decode b8 c256" in line]
    assert "1,789.4" in prefill
    assert "%" in prefill
    assert "2.00x" in decode
    assert "1.58x" in decode


def test_a_duel_shows_every_round() -> None:
    duel = Duel(BatchCell(8), ours=[20.0, 21.0, 40.0], peer=[30.0, 31.5, 30.0])
    [line] = [line for line in shown(duels_table([duel])) if "decode_ms_b8" in line]
    assert "1.50 1.50 0.75" in line
    assert "1.43x" in line
