"""The check of a device, where there is no GPU: it measures this processor, and refuses what is not there."""

import pytest
import torch

from workers import device_check


def test_it_measures_all_cases_and_says_go_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "REPEATS", 2)
    monkeypatch.setattr(device_check, "SEQUENCES", (1, 4))
    monkeypatch.setattr(device_check, "LOADS", (1, 4))
    code = device_check.main(["--device", "cpu", "--shape", "tiny", "--dtype", "float32"])
    said = capsys.readouterr().out.splitlines()
    assert "exact: rows as transformers' forward, float32" in said[1]
    heads = ("rows", "at once")
    rows = [
        line for line in said if line.startswith("| ") and not any(head in line for head in heads)
    ]
    assert len(rows) == len(device_check.ROWS) * len(device_check.SEQUENCES) + 2
    gains = [float(row.split("|")[-2]) for row in rows[-2:]]
    assert all(0.2 < gain < 9 for gain in gains)
    assert said[-1].startswith("go" if code == 0 else "no go: ")


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        device_check.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "finds no CUDA device" in capsys.readouterr().err
