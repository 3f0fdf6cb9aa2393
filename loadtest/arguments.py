"""The command line of `python -m loadtest`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from contracts.dataplane import Transport
from loadtest.dataplane_case import KIB, MIB, read_bytes, shown_bytes

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
        "handoff",
        help="what a handoff costs: prefill/decode beside mixed workers, phases, handoff gap, bytes, push speed",
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
    dataplane = commands.add_parser(
        "dataplane",
        help="shm and tcp (and mooncake, where it is installed) beside memcpy and a raw socket, between processes",
    )
    _add_dataplane(dataplane)
    overlap = commands.add_parser("overlap", help="how much of the pushes is hidden behind the compute of prompts")
    _add_overlap(overlap)
    memory = commands.add_parser("memory", help="whether any process grows over thousands of requests")
    _add_memory(memory)
    control = commands.add_parser("control", help="handoffs a second through one broker, and what it adds to each")
    _add_control(control)
    shard_pull = commands.add_parser(
        "shard-pull",
        help="serial pull, parallel pull and push of a request's cache, without latency and with it",
        description="Serial pull, parallel pull and push of a request's cache, without latency and with it. With the defaults it starts "
        "8 meshes and sends 780 requests: 5 to 10 minutes on two cores that do nothing else. A run with fewer rounds or requests is quicker, "
        "and shows whether it works, but little of how long it takes: rounds even out what the machine does meanwhile, and the p99 of "
        "a few requests is the slowest of them.",
    )
    _add_shard_pull(shard_pull)
    dcp = commands.add_parser(
        "dcp", help="decode steps behind long contexts, memory and handoffs, with a KV head's blocks shared by ranks"
    )
    _add_dcp(dcp)
    speculate = commands.add_parser(
        "speculate", help="what guessed tokens gain at each depth, how often they are right, and what passes cost"
    )
    _add_speculate(speculate)
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
    _integer(command, "--warm-ups", "num_warm_ups", 8, "requests to each mode before the rounds, not measured")
    _integer(command, "--safety-requests", "safety_requests", safety_requests, "requests sent two at once at the end")
    if command.prog.endswith("handoff"):
        _integer(command, "--push-repeats", "push_repeats", push_repeats, "pushes of each sequence; 0: none")
    else:
        command.set_defaults(push_repeats=push_repeats)
    command.add_argument(
        "--mixed",
        action=_Specs,
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


def _add_dataplane(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    sizes = tuple(KIB << shift for shift in (6, 8, 10, 12, 14, 16))
    for flag, default, what in (
        ("--sizes", sizes, "bytes of a transfer"),
        ("--pieces", (4 * KIB, 16 * KIB), "bytes of a piece, of transfers that are cut"),
    ):
        command.add_argument(
            flag,
            type=_sizes,
            default=default,
            metavar="N,N",
            help=f"{what} (default: {','.join(shown_bytes(each).replace(' ', '') for each in default)})",
        )
    command.add_argument(
        "--sources",
        dest="num_sources",
        type=_lengths,
        default=(1, 2),
        metavar="N,N",
        help="processes that send at once to one (default: 1,2)",
    )
    for flag, name, nbytes, what in (
        ("--region", "region_bytes", 256 * MIB, "memory that transfers are rotated through"),
        ("--block", "block_bytes", 64 * MIB, "bytes that each way moves in its part of a round"),
    ):
        shown = shown_bytes(nbytes).replace(" ", "")
        command.add_argument(
            flag, dest=name, type=_size, default=nbytes, metavar="N", help=f"{what} (default: {shown})"
        )
    _integer(command, "--rounds", "num_rounds", 15, "rounds; the ways take turns in each")
    _seconds(command, "--time-limit", "time_limit_s", 900.0)


def _add_overlap(command: argparse.ArgumentParser) -> None:
    _add_mesh(command, prefill="tp=1", num_seconds=1200.0)
    command.add_argument(
        "--prompt-tokens",
        type=_lengths,
        default=(1024, 4096),
        metavar="N,N",
        help="prompt lengths (default: 1024,4096)",
    )
    _integer(command, "--requests", "num_requests", 5, "requests a round and prompt length")
    _integer(command, "--rounds", "num_rounds", 5, "rounds; the lengths take turns in each")
    _integer(command, "--warm-ups", "num_warm_ups", 3, "requests of each length before the rounds, not measured")


def _add_memory(command: argparse.ArgumentParser) -> None:
    _add_mesh(command, prefill="tp=2", num_seconds=3600.0)
    command.add_argument(
        "--transport",
        dest="transports",
        type=lambda text: tuple(text.split(",")),
        default=tuple(Transport),
        metavar="NAME,NAME",
        help=f"what moves the bytes, one mesh after the other (default: {','.join(Transport)})",
    )
    _integer(command, "--prompt-tokens", "num_prompt_tokens", 16, "tokens of each prompt")
    _integer(command, "--output-tokens", "num_output_tokens", 4, "tokens of each answer")
    _integer(command, "--requests", "num_requests", 2000, "requests that are measured")
    _integer(command, "--warm-ups", "num_warm_ups", 200, "requests before")
    _seconds(command, "--warm-up-seconds", "warm_up_s", 60.0)
    _integer(command, "--sample-every", "sample_every", 50, "requests between two looks at the processes")
    _integer(command, "--concurrency", "concurrency", 8, "requests under way at once")


def _add_shard_pull(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument("--model", metavar="DIR", type=Path, default=_SHIPPED_MODEL, help="the checkpoint")
    command.add_argument(
        "--prefill",
        action=_Specs,
        default=("tp=2", "tp=4"),
        metavar="SPEC",
        help="a prefill worker; may be repeated (default: tp=2 and tp=4)",
    )
    command.add_argument("--decode", metavar="SPEC", default="tp=1", help="the decode worker (default: tp=1)")
    command.add_argument(
        "--pull", default="states", metavar="WHAT", help="what is pulled, states or all (default: states)"
    )
    command.add_argument(
        "--latency-ms",
        dest="latencies_ms",
        type=_lengths,
        default=(),
        metavar="MS,MS",
        help="latency of each link; 0 is always measured, and 0 alone nothing else (default: one that is looked for)",
    )
    command.add_argument(
        "--mb-per-s", type=int, default=0, metavar="N", help="bytes a second of each link (default: no bound)"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="[ROLE.]KEY=VALUE",
        help="a setting of all meshes",
    )
    _integer(command, "--prompt-tokens", "num_prompt_tokens", 256, "tokens of each prompt")
    _integer(command, "--vocabulary", "vocab_size", 0, "token ids of prompts are below this; 0: the model's vocabulary")
    _integer(command, "--requests", "num_requests", 20, "requests a round, mode and latency")
    _integer(command, "--rounds", "num_rounds", 3, "rounds; the modes take turns in each; fewer than 3 say little")
    _integer(command, "--warm-ups", "num_warm_ups", 5, "requests of each mode before the rounds, not measured")
    _integer(command, "--seed", "seed", 1, "of the prompts")
    _add_times(command, request_s=120.0, all_s=1800.0)


def _add_dcp(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument(
        "--contexts",
        type=_lengths,
        default=(1024, 4096, 16384, 65536),
        metavar="N,N",
        help="tokens before the step (default: 1024,4096,16384,65536; shorter runs: leave out the last)",
    )
    command.add_argument(
        "--ranks",
        type=_lengths,
        default=(2, 4),
        metavar="N,N",
        help="ranks with the same KV head; where cores lack, one works and the others are simulated (default: 2,4)",
    )
    _integer(command, "--steps", "num_steps", 10, "steps in each round, context and size of groups")
    _integer(command, "--rounds", "num_rounds", 5, "rounds; the sizes of groups take turns in each")
    command.add_argument("--model", metavar="DIR", type=Path, default=_SHIPPED_MODEL, help="the meshes' checkpoint")
    command.add_argument("--prefill", metavar="SPEC", default="tp=2", help="the prefill worker (default: tp=2)")
    command.add_argument(
        "--decode",
        action=_Specs,
        default=("tp=8", "tp=8,dcp=2", "tp=8,dcp=4"),
        metavar="SPEC",
        help="a decode worker; may be repeated (default: tp=8 with dcp 1, 2 and 4)",
    )
    _integer(command, "--blocks", "num_blocks", 20, "blocks of each decode rank")
    _integer(command, "--requests", "num_requests", 3, "requests of each length to each mesh; 0: no meshes")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="[ROLE.]KEY=VALUE",
        help="a setting of all meshes",
    )
    _integer(command, "--seed", "seed", 1, "of the prompts")
    _add_times(command, request_s=120.0, all_s=1800.0)


def _add_speculate(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument("--model", metavar="DIR", type=Path, default=_SHIPPED_MODEL, help="the checkpoint")
    command.add_argument(
        "--depths",
        type=_lengths,
        default=(1, 2, 3, 5),
        metavar="N,N",
        help="guesses a step; none is always measured beside them (default: 1,2,3,5)",
    )
    command.add_argument(
        "--batches",
        type=_lengths,
        default=(1, 8),
        metavar="N,N",
        help="sequences side by side, and requests under way at once (default: 1,8)",
    )
    command.add_argument(
        "--temperatures", type=_numbers, default=(0.0, 0.8), metavar="T,T", help="0 is greedy (default: 0,0.8)"
    )
    _integer(command, "--output-tokens", "num_output_tokens", 96, "tokens of each answer")
    _integer(command, "--passes", "num_passes", 10, "passes by themselves in each round and case")
    _integer(command, "--rounds", "num_rounds", 5, "rounds; the depths take turns in each")
    _integer(command, "--requests", "num_requests", 8, "requests to each mesh in each round; 0: no meshes")
    _add_times(command, request_s=120.0, all_s=1800.0)


def _add_control(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument(
        "--in-flight",
        type=_lengths,
        default=(1, 16, 64, 256),
        metavar="N,N",
        help="handoffs under way at once (default: 1,16,64,256)",
    )
    _integer(command, "--handoffs", "num_handoffs", 2000, "handoffs at each number in flight")
    command.add_argument(
        "--keep-ended",
        dest="keep_ended_s",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds for which the broker remembers what has ended (default: 2)",
    )
    command.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="a setting of the broker"
    )
    _add_times(command, request_s=30.0, all_s=600.0)


def _add_common(command: argparse.ArgumentParser, *, concurrency: int, num_rounds: int, time_limit_s: float) -> None:
    _add_mesh(command, prefill="tp=2", num_seconds=time_limit_s)
    _integer(command, "--rounds", "num_rounds", num_rounds, "rounds; the modes take turns in each")
    _integer(command, "--concurrency", "concurrency", concurrency, "requests under way at once")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well, by name")


def _add_mesh(command: argparse.ArgumentParser, *, prefill: str, num_seconds: float) -> None:
    """What every command takes that starts meshes."""
    _add_json(command)
    command.add_argument("--model", metavar="DIR", type=Path, default=_SHIPPED_MODEL, help="the checkpoint")
    command.add_argument("--prefill", metavar="SPEC", default=prefill, help=f"the prefill worker (default: {prefill})")
    command.add_argument("--decode", metavar="SPEC", default="tp=1", help="the decode worker (default: tp=1)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="[ROLE.]KEY=VALUE",
        help="a setting of the services of every mesh; may be repeated",
    )
    if not command.prog.endswith("recall"):
        _integer(
            command, "--vocabulary", "vocab_size", 0, "token ids of prompts are below this; 0: the model's vocabulary"
        )
    _integer(command, "--seed", "seed", 1, "of the prompts")
    _add_times(command, request_s=120.0, all_s=num_seconds)


def _add_times(command: argparse.ArgumentParser, *, request_s: float, all_s: float) -> None:
    _seconds(command, "--request-timeout", "request_timeout_s", request_s)
    _seconds(command, "--time-limit", "time_limit_s", all_s)


def _seconds(command: argparse.ArgumentParser, flag: str, name: str, default: float) -> None:
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


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,0.8") from None


def _size(text: str) -> int:
    try:
        return read_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64KiB or 16MiB") from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(each) for each in text.split(",") if each)


class _Specs(argparse.Action):
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
