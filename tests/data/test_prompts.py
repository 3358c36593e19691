import pytest

from megatron_omni.data.prompts import PromptSet
from megatron_omni.errors import UserError


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeffa cat\r\n\n  a sign “OPEN”\u2028now \n")
    prompts = PromptSet.from_file(path)
    assert [row.metadata for row in prompts.rows] == [
        {"prompt": "a cat"},
        {"prompt": "a sign “OPEN”\u2028now"},
    ]
    assert [row.index for row in prompts.rows] == [0, 1]


def test_json_rows_keep_their_metadata(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "a sign", "target": "OPEN"}\n\n{"prompt": "b"}\n')
    prompts = PromptSet.from_file(path)
    assert [row.metadata for row in prompts.rows] == [{"prompt": "a sign", "target": "OPEN"}, {"prompt": "b"}]
    assert prompts.rows[0].prompt == "a sign"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "holds no prompt"),
        ("p.jsonl", "\n \n", "holds no prompt"),
        ("p.txt", b"\xff\xfe\xfa", "cannot be read"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n["b"]', "line 3: not an object"),
        ("p.jsonl", '{"text": "a"}', 'line 1: "prompt"'),
        ("p.jsonl", '{"prompt": 3}', 'line 1: "prompt"'),
        ("p.jsonl", '{"prompt": " "}', 'line 1: "prompt"'),
    ],
)
def test_a_bad_file_is_an_error_that_says_where(tmp_path, name, text, message):
    path = write(tmp_path, name, text)
    with pytest.raises(UserError) as error:
        PromptSet.from_file(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_or_a_folder_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UserError, match="cannot be read") as error:
            PromptSet.from_file(path)
        assert str(path) in str(error.value)


def test_batches_walk_through_the_set(tmp_path):
    prompts = PromptSet.from_file(write(tmp_path, "p.txt", "\n".join("abcdef")))
    seen = [row.prompt for iteration in range(3) for row in prompts.batch(iteration, 2, seed=0)]
    assert sorted(seen) == list("abcdef")
