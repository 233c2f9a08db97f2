"""The program of the page "From Python" trains a model and draws its curve."""

import re
import subprocess
import sys
from pathlib import Path

import qurl_megatron
from e2e.running import QUICK

PAGE = Path(qurl_megatron.__file__).parents[1] / "docs" / "python.md"


def test_a_program_trains_draws_and_reads_its_run(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    words = ", ".join(map(repr, QUICK))
    file = tmp_path / "program.py"
    file.write_text(program.replace('"quickstart", "steps=8"', words))
    ended = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^runs/run/final_model \[[\d.]+, [\d.]+\]$", ended.stdout, re.MULTILINE)
    assert "<svg" in (tmp_path / "reward.svg").read_text()
    run = qurl_megatron.read_run(f"{tmp_path}/runs/run")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert run.config.optimizer.learning_rate == 2e-4
