import json

import pytest

from rollart.tasks.prompt_files import FolderPrompts, JsonLinesPrompts
from rollart.tasks.split import is_held_out
from rollart.types.errors import RequestError


def written(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def ids(source, count):
    return sorted(source.next().id for _ in range(count))


def test_a_line_is_a_prompt(tmp_path):
    file = written(tmp_path / "p.jsonl", {"q": "a"}, "\n", {"id": "mine", "q": "b"})
    source = JsonLinesPrompts("t", file)
    prompts = sorted((source.next() for _ in range(2)), key=lambda prompt: prompt.seed)
    assert [(p.id, p.task, p.seed, p.data) for p in prompts] == [
        ("1", "t", 0, {"q": "a"}),
        ("mine", "t", 1, {"id": "mine", "q": "b"}),
    ]


def test_a_file_is_a_prompt(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("Grüße", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no prompt")
    source = FolderPrompts("t", str(tmp_path))
    found = {prompt.id: prompt.data for prompt in (source.next(), source.next())}
    assert found == {
        "a.txt": {"name": "a.txt", "text": "one"},
        "deep/b.txt": {"name": "deep/b.txt", "text": "Grüße"},
    }


@pytest.mark.parametrize("change", [{"q": "a!"}, {"q": "a", "more": 1}])
def test_a_changed_file_is_refused(tmp_path, change):
    file = written(tmp_path / "p.jsonl", {"q": "a"}, {"q": "b"})
    cursor = JsonLinesPrompts("t", file).cursor()
    JsonLinesPrompts("t", file).seek(cursor)
    written(tmp_path / "p.jsonl", change, {"q": "b"})
    with pytest.raises(RequestError, match="digest"):
        JsonLinesPrompts("t", file).seek(cursor)


def test_a_renamed_file_of_a_folder_is_refused(tmp_path):
    (tmp_path / "ab").write_text("c")
    cursor = FolderPrompts("t", str(tmp_path)).cursor()
    (tmp_path / "ab").rename(tmp_path / "a")
    (tmp_path / "a").write_text("bc")
    with pytest.raises(RequestError, match="digest"):
        FolderPrompts("t", str(tmp_path)).seek(cursor)


def test_the_sides_are_disjoint_by_content(tmp_path):
    rows = [{"id": f"{copy}/{number}", "q": number} for number in range(60) for copy in range(2)]
    file = written(tmp_path / "p.jsonl", *rows)
    sides = {}
    for held_out in (False, True):
        source = JsonLinesPrompts("t", file, held_out=held_out)
        taken = [source.next() for _ in range(120)]
        sides[held_out] = {prompt.data["q"] for prompt in taken}
    assert not sides[False] & sides[True]
    assert sides[False] | sides[True] == set(range(60))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (["{oops\n"], "line 1: not JSON"),
        ([{"q": 1}, "[1]\n"], "line 2: expected a JSON object, not a list"),
        ([{"id": 7}, {"id": "7"}], "line 2: duplicate id '7'"),
        ([{"answer": 2**64 - 1}, {"answer": 2**64}], "line 2: .*; write large numbers as text"),
        (['{"q": "\\ud800"}\n'], "line 1: .*surrogates not allowed"),
        ([], "has no prompts for 't'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, rows, problem):
    with pytest.raises(RequestError, match=problem):
        JsonLinesPrompts("t", written(tmp_path / "p.jsonl", *rows))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        JsonLinesPrompts("t", str(tmp_path / "nowhere"))
    with pytest.raises(RequestError, match="is not a folder"):
        FolderPrompts("t", str(tmp_path / "nowhere"))
    (tmp_path / "picture").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="picture is not UTF-8 text"):
        FolderPrompts("t", str(tmp_path))


def test_tables_beside_other_files_are_no_texts(tmp_path):
    written(tmp_path / "train.jsonl", {"q": "a"})
    (tmp_path / "README.md").write_text("About the data.")
    with pytest.raises(RequestError, match=r"has tables \(train.jsonl\) and other files \(README.md\)"):
        FolderPrompts("t", str(tmp_path))


def test_a_side_without_prompts_is_refused(tmp_path):
    file = written(tmp_path / "p.jsonl", {"q": "a"})
    side = is_held_out('{"q": "a"}')
    assert JsonLinesPrompts("t", file, held_out=side).next().data == {"q": "a"}
    with pytest.raises(RequestError, match="has no prompts"):
        JsonLinesPrompts("t", file, held_out=not side)
