"""`pdmesh check-config`: what is said of each service's settings, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from common.worker.core.compatibility import Verdict
from services.launcher.plan import Finding, MeshCheck

_MESH = "mesh"


def render_check(check: MeshCheck) -> str:
    """A block a service: refusals, warnings, settings that come to something else; then what it all comes to. No newline at the end."""
    places = dict.fromkeys(("", *check.workers, *(each.service for each in check.findings)))
    blocks: list[str] = []
    for place in places:
        findings = [each for each in check.findings if each.service == place]
        lines = [*_findings(findings), *_verdict(check.verdicts.get(place))]
        if place or lines:
            blocks.append("\n".join((place or _MESH, *(f"  {line}" for line in lines or ("nothing to say",)))))
    num_cautions = sum(len(verdict.cautions) for verdict in check.verdicts.values())
    end = "it may start" if check.plan is not None else "it may not start"
    return "\n".join((*blocks, f"{end}: {len(check.findings)} refused, {num_cautions} warned of"))


def _findings(findings: Iterable[Finding]) -> Iterator[str]:
    for each in findings:
        problem = each.problem
        yield f"refused: {problem.key} = {problem.value}: {problem.rule}"
        if problem.name:
            yield f"  {problem.name}: {problem.remedy}"


def _verdict(verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        return
    for caution in verdict.cautions:
        yield f"warning: {caution.text}"
        yield f"  {caution.name}: {caution.remedy}"
    for each in verdict.resolved:
        yield f"{each.key} = {_shown(each.value)} comes to {_shown(each.effective)}: {each.reason}"


def _shown(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
