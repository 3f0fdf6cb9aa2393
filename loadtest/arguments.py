"""The command line of `python -m loadtest`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

_SHIPPED_MODEL: Final = Path(__file__).resolve().parents[1] / "models" / "tiny"
_MIXED: Final = ("tp=2", "tp=1")


def parser() -> argparse.ArgumentParser:
    """The parser. Its result has `command`, `json`, and the fields of that command's settings by their names."""
    root = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Load tests of meshes on this machine. Absolute times tell of the machine; compare within one run.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    handoff = commands.add_parser(
        "handoff", help="what a handoff costs: prefill/decode beside mixed workers, phases, takeover, bytes, push speed"
    )
    _add_load(handoff, prompt_tokens=(64, 1024), num_requests=20, safety_requests=0, push_repeats=10)
    contract = commands.add_parser(
        "contract", help="the test contract: 200 requests in each of 3 rounds, then two at once; answers compared"
    )
    _add_load(contract, prompt_tokens=(256,), num_requests=200, safety_requests=50, push_repeats=0)
    recall = commands.add_parser(
        "recall", help="how many recall questions are answered rightly, with and without a planted fault"
    )
    _add_recall(recall)
    return root


def _add_load(
    command: argparse.ArgumentParser,
    *,
    prompt_tokens: tuple[int, ...],
    num_requests: int,
    safety_requests: int,
    push_repeats: int,
) -> None:
    _add_common(command, concurrency=1, num_rounds=3, time_limit_s=3600.0)
    command.add_argument(
        "--prompt-tokens",
        type=_lengths,
        default=prompt_tokens,
        metavar="N,N",
        help=f"prompt lengths (default: {','.join(map(str, prompt_tokens))})",
    )
    _integer(command, "--requests", "num_requests", num_requests, "requests a round, prompt length and mode")
    _integer(command, "--output-tokens", "num_output_tokens", 25, "tokens of each answer")
    _integer(command, "--vocabulary", "vocab_size", 0, "token ids of prompts are below this; 0: the model's vocabulary")
    _integer(command, "--warm-ups", "num_warm_ups", 8, "requests to each mode before the rounds, not measured")
    _integer(command, "--safety-requests", "safety_requests", safety_requests, "requests sent two at once at the end")
    if command.prog.endswith("handoff"):
        _integer(command, "--push-repeats", "push_repeats", push_repeats, "pushes of each sequence; 0: none")
    else:
        command.set_defaults(push_repeats=push_repeats)
    command.add_argument(
        "--mixed",
        action=_Mixed,
        default=_MIXED,
        metavar="SPEC",
        help=f"a mixed worker to compare with; may be repeated (default: {' and '.join(_MIXED)})",
    )


def _add_recall(command: argparse.ArgumentParser) -> None:
    _add_common(command, concurrency=2, num_rounds=5, time_limit_s=1800.0)
    command.add_argument("--url", default="", help="ask a running mesh; nothing is started")
    command.add_argument(
        "--fault",
        default="",
        metavar="SPEC",
        help="start a second mesh whose prefill worker has these failpoints, and show how accuracy drops",
    )
    _integer(command, "--tasks", "num_tasks", 100, "prompts in all, to each mesh")
    _integer(command, "--pairs", "num_pairs", 24, "key-value pairs in a prompt")
    _integer(command, "--questions", "num_questions", 8, "keys asked for in a prompt")


def _add_common(command: argparse.ArgumentParser, *, concurrency: int, num_rounds: int, time_limit_s: float) -> None:
    command.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well, by name")
    command.add_argument("--model", metavar="DIR", type=Path, default=_SHIPPED_MODEL, help="the checkpoint")
    command.add_argument("--prefill", metavar="SPEC", default="tp=2", help="the prefill worker (default: tp=2)")
    command.add_argument("--decode", metavar="SPEC", default="tp=1", help="the decode worker (default: tp=1)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="[ROLE.]KEY=VALUE",
        help="a setting of the services of every mesh; may be repeated",
    )
    _integer(command, "--rounds", "num_rounds", num_rounds, "rounds; the modes take turns in each")
    _integer(command, "--concurrency", "concurrency", concurrency, "requests under way at once")
    _integer(command, "--seed", "seed", 1, "of the prompts")
    for flag, name, default in (
        ("--request-timeout", "request_timeout_s", 120.0),
        ("--time-limit", "time_limit_s", time_limit_s),
    ):
        command.add_argument(
            flag, dest=name, type=float, default=default, metavar="S", help=f"seconds (default: {default:g})"
        )


def _integer(command: argparse.ArgumentParser, flag: str, name: str, default: int, what: str) -> None:
    command.add_argument(flag, dest=name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 64,1024") from None


class _Mixed(argparse.Action):
    """Collects SPECs; the first that is given replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - argparse's signature
    ) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*(() if given is self.default else given), str(values)))
