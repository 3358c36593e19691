"""Prompt sets: text files and JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_omni.data.sampler import batch_indices
from megatron_omni.errors import UserError


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a set."""

    index: int
    """Position in the set, from 0."""
    metadata: dict[str, Any]
    """The row as the file has it, "prompt" included: what the reward sees."""

    @property
    def prompt(self) -> str:
        return self.metadata["prompt"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts, in the order of their file."""

    rows: list[PromptRow]

    @classmethod
    def from_file(cls, path: str | Path) -> "PromptSet":
        """Read .jsonl rows, objects with "prompt" and other metadata, or a text file with a prompt a line.

        Blank lines are skipped. Raises `UserError` for a file that is missing or not UTF-8 or empty, and with
        its line number for a row that is not an object with a prompt.
        """
        path = Path(path)
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"prompt file {str(path)!r} cannot be read: {error}") from error
        parse = _parse_json if path.suffix == ".jsonl" else _parse_text
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
        if not numbered:
            raise UserError(f"prompt file {str(path)!r} holds no prompt")
        return cls(
            [
                PromptRow(index, parse(line, f"{path}, line {number}"))
                for index, (number, line) in enumerate(numbered)
            ]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, iteration: int, size: int, seed: int) -> list[PromptRow]:
        """The `size` rows of `iteration`, over all data-parallel ranks; see `sampler.batch_indices`."""
        return [self.rows[index] for index in batch_indices(len(self), iteration, size, seed)]


def _parse_text(line: str, place: str) -> dict[str, Any]:
    return {"prompt": line}


def _parse_json(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error}): {line[:80]}") from error
    if not isinstance(row, dict):
        raise UserError(f'{place}: not an object like {{"prompt": "…"}}: {line[:80]}')
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f'{place}: "prompt" must be a text that is not empty: {line[:80]}')
    return row
