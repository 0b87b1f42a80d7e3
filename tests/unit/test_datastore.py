"""Datastores: built, loaded, refused; and searched, against the definition."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments import check
from tests import tiny
from tests.unit.test_automaton import check_place
from tests.unit.test_config import changed
from workers.datastore import __main__ as command
from workers.datastore import files
from workers.datastore.files import DatastoreError, Description, describe
from workers.datastore.index import Datastore
from workers.datastore.suffix_array import suffix_array
from workers.draft import drafters
from workers.draft.config import DatastoreConfig
from workers.draft.counting import MAX_MATCH, MIN_MATCH
from workers.vocabulary import vocabulary_fingerprint

tokenizer = tiny.byte_level_tokenizer()
FINGERPRINT = vocabulary_fingerprint(tokenizer.backend_tokenizer)
TEXTS = ["the cat in the hat sat on the mat", "the cat in the box", "", "another line"]


def run(*arguments: object) -> int:
    return command.main(["build", *map(str, arguments)])


@given(st.lists(st.integers(0, 3), max_size=80), st.sampled_from([1, 2, 8, 32]))
def test_positions_are_sorted_by_what_follows(tokens: list[int], depth: int) -> None:
    found = suffix_array(np.array(tokens, np.uint16), depth, lambda: None)
    expected = sorted(range(len(tokens)), key=lambda i: (tokens[i : i + depth], i))
    assert found.tolist() == expected


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), max_size=20),
    st.sampled_from([">u2", ">u4"]),
)
def test_ends_are_found_with_what_follows_them(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], tail: list[int], dtype: str
) -> None:
    store = tiny.datastore(tmp_path_factory.mktemp("store"), texts, dtype)
    occurring = [
        length
        for length in range(MIN_MATCH, min(MAX_MATCH, len(tail)) + 1)
        if any(text[i : i + length] == tail[-length:] for text in texts for i in range(len(text)))
    ]
    found = list(store.find(tail))
    assert [match.length for match in found[:1]] == occurring[-1:]
    joined = [token for text in texts for token in (*text, -1)]
    totals = [match.place.followers()[0] for match in found]
    assert totals == sorted(set(totals))
    for match in found:
        check_place(match.place, joined, tail[-match.length :], 2)


def test_of_many_occurrences_some_are_looked_at(tmp_path: Path) -> None:
    store = tiny.datastore(tmp_path, [[1, 2, 3], [1, 2, 4], [1, 2, 4]] * 2000)
    total, followers = next(store.find([1, 2])).place.followers()
    assert total <= 1024
    assert [token for token, _, _ in followers] == [4, 3]
    assert followers[0][1] / total == pytest.approx(2 / 3, abs=0.01)


def test_tokens_that_no_datastore_holds_match_nothing(tmp_path: Path) -> None:
    store = tiny.datastore(tmp_path, [[1, 2, 3]])
    for tail in ([], [1], [1, files.separator(2)], [1, 10**9], [3, files.separator(2), 1]):
        assert not list(store.find(tail))


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """The same texts in every format."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:2]))
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(TEXTS))
    rows = [tokenizer(text).input_ids for text in TEXTS[:2]]
    ends = np.cumsum([0, *map(len, rows)])
    recorded = tmp_path / "recorded.npz"
    np.savez(
        recorded,
        prompt_ids=np.array([1, 2], np.uint16),
        prompt_offsets=np.array([0, 1, 2]),
        output_ids=np.concatenate(rows).astype(np.uint16),
        output_offsets=ends,
    )
    return [lines, plain, recorded]


def test_built_from_texts_and_recorded_tokens(
    tmp_path: Path, corpus: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    assert run("--tokenizer", tiny.llama(), "--corpus", *corpus, "--out", out) == 0
    shown = capsys.readouterr()
    assert "of 5 texts" in shown.out
    assert "sorting" in shown.err
    described = describe(out)
    assert (described.vocabulary_fingerprint, described.num_texts) == (FINGERPRINT, 5)
    store = Datastore(out, FINGERPRINT)
    match = next(store.find(tokenizer("cat in the").input_ids))
    total, followers = match.place.followers()
    assert match.length == len(tokenizer("cat in the").input_ids)
    # Once in each of two texts, in three files.
    assert total == 6
    assert followers[0][1] == 6
    made = drafters.make(DatastoreConfig("d", str(out), False, 1024), str(tiny.llama()))
    assert made.vocabulary_fingerprint == FINGERPRINT
    # Nothing is written over.
    assert run("--tokenizer", tiny.llama(), "--corpus", *corpus, "--out", out) == 1
    assert "another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.jsonl", "{", "x.jsonl:1 is no JSON"),
        ("x.jsonl", '"fine"\n{"txt": "a"}', "x.jsonl:2 has no text"),
        ("x.txt", "", "no text in"),
        ("x.npz", None, "lacks"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_named(
    tmp_path: Path,
    name: str,
    content: str | None,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    elif name == "x.npz":
        np.savez(file, prompt_ids=[1])
    out = tmp_path / "store"
    assert run("--tokenizer", tiny.llama(), "--corpus", file, "--out", out) == 1
    assert complaint in capsys.readouterr().err
    assert not out.exists()


def test_recorded_tokens_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.npz"
    rows = {"prompt_offsets": [0, 1], "output_offsets": [0, 1], "output_ids": [1]}
    np.savez(file, prompt_ids=[9999], **rows)
    arguments = ("--tokenizer", tiny.llama(), "--corpus", file, "--out", tmp_path / "store")
    assert run(*arguments) == 1
    assert "9999" in capsys.readouterr().err


def test_a_folder_without_a_usable_datastore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match=r"holds no datastore: build one with python -m"):
        describe(tmp_path / "nowhere")
    tiny.datastore(tmp_path, [[1, 2, 3]])
    with pytest.raises(DatastoreError, match="another vocabulary"):
        Datastore(tmp_path, "other")
    np.save(tmp_path / files.SUFFIXES, np.zeros(2, np.int32))
    with pytest.raises(DatastoreError, match="build it again"):
        Datastore(tmp_path, FINGERPRINT)
    (tmp_path / files.SUFFIXES).unlink()
    with pytest.raises(DatastoreError, match=r"lacks suffixes\.npy"):
        describe(tmp_path)
    Description("f", 1, 1, format=9).write(tmp_path)
    with pytest.raises(DatastoreError, match="format 9"):
        describe(tmp_path)
    (tmp_path / files.DESCRIPTION).write_text("{")
    with pytest.raises(DatastoreError, match="broken"):
        describe(tmp_path)


def test_the_check_of_a_config_looks_at_datastores(tmp_path: Path) -> None:
    def problems(folder: Path, target: object) -> list[str]:
        drafts = [{"name": "a", "kind": "datastore", "folder": str(folder)}]
        config = changed("applications.0.args.drafts", drafts)
        config["applications"][0]["args"]["target"]["model"] = str(target)
        return check.check(config)

    tiny.datastore(tmp_path / "store", [[1, 2, 3]])
    assert problems(tmp_path / "store", tiny.llama()) == []
    missing = problems(tmp_path / "nowhere", tiny.llama())
    assert "args.drafts.0.folder" in missing[0]
    assert "python -m workers.datastore build" in missing[0]
    other = problems(tmp_path / "store", tiny.spelling_llama())
    assert "another vocabulary" in other[0]
    # What has to be fetched first is not looked at.
    assert problems(tmp_path / "store", "someone/some-model") == []
