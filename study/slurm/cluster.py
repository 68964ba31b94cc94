"""What a point asks of the cluster: the user's ``cluster.yaml``, with other values for some scales and sweeps.

Merge order, the later over the earlier: the file's top ← ``scales[scale]`` ← ``sweeps[name]`` ←
``sweeps["name-scale"]``. ``cluster.example.yaml`` shows every key.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from study.config.explain import explain
from study.config.reading import read_yaml
from study.config.schema import render
from study.errors import UserError
from study.sweep import grid

DEFAULT = Path("cluster.yaml")

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d)(?::(?P<seconds>[0-5]\d))?")


def minutes(value: object) -> object:
    """Minutes of ``"1:30:00"``, ``"1:30"`` (hours and minutes) or ``"2-00:00"`` (days); anything else as it is."""
    if isinstance(value, str) and (match := _TIME.fullmatch(value)):
        days, hours, mins, seconds = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + mins + (seconds > 0)
    return value


def _time(value: object) -> object:
    if isinstance(found := minutes(value), str):
        raise ValueError("minutes, hours:minutes, hours:minutes:seconds or days-hours:minutes, below 60 of each")
    return found


class Cluster(BaseModel):
    """Resources of one point and how its job starts; null leaves a choice to the cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    partition: str | None = Field(None, description="Partition, or several with commas.")
    account: str | None = Field(None, description="Account that is charged.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that the node must have, such as a100.")
    time: Annotated[int, BeforeValidator(_time), Field(ge=1)] = Field(
        60, description="Minutes, or hours:minutes, a job may take; a longer point continues in the next job."
    )
    nodes: int = Field(1, ge=1, description="Nodes a point.")
    gpus: int = Field(0, ge=0, description="GPUs a node.")
    tasks: int | None = Field(None, ge=1, description="Processes a node; null: one a GPU, at least one.")
    cpus: int = Field(1, ge=1, description="CPU cores a process.")
    memory: str | None = Field(
        None, pattern=r"^\d+[KMGT]?$", examples=["16G", "500M"], description="Memory a node, such as 16G."
    )
    parallel: int | None = Field(None, ge=1, description="Points that run at once, over all arrays of a submission.")
    signal_s: int | None = Field(
        None, ge=1, description="Seconds before the end at which a job saves; null: 90, a quarter of a short time."
    )
    modules: list[str] = Field([], description="Loaded with `module load` before the point starts.")
    setup: list[str] = Field([], description="Shell lines before the point starts.")
    container: str | None = Field(None, description="Command that starts the container; python follows it.")
    python: str | None = Field(None, description="The interpreter there; null: the one that submits.")
    mlflow: bool = Field(
        False, description="Jobs push to MLFLOW_TRACKING_URI themselves: an http(s) server that the nodes reach."
    )
    sbatch: dict[str, str | int | bool] = Field({}, description="Other options of sbatch by their long names.")

    @property
    def tasks_per_node(self) -> int:
        return self.tasks or max(1, self.gpus)

    @property
    def save_s(self) -> int:
        """Seconds between the signal to save and the end; Slurm may send it up to a minute earlier."""
        return self.signal_s or min(90, self.time * 15)


RESERVED = frozenset({"array", "job-name", "output", "error", "open-mode", "requeue", "dependency", "parsable"})
"""Options that the launcher sets itself: another value would lose track of the jobs."""

OWN = {
    **{option: option for option in ("partition", "account", "qos", "constraint", "time", "nodes")},
    **{"gpus-per-node": "gpus", "ntasks-per-node": "tasks", "cpus-per-task": "cpus"},
    **{"mem": "memory", "signal": "signal_s"},
}
"""Options of sbatch that have a key of their own: to set one twice would leave open which counts."""


def load(path: Path | None, sweep: str, scale: str, scales: Collection[str] = ()) -> Cluster:
    """Read the resources of one sweep at one scale.

    Args:
        path: the file; None takes ``cluster.yaml`` of the working directory, and Slurm's defaults without one.
        sweep: the sweep's name.
        scale: the scale's name.
        scales: names of scales beyond the project's own.

    Raises:
        UserError: the file is not there or not YAML, or has an unknown key or a value that is not allowed.
    """
    if path is None:
        if not DEFAULT.exists():
            return Cluster.model_validate({})
        path = DEFAULT
    tree = read_yaml(path)
    over = {kind: _section(path, tree, kind) for kind in ("scales", "sweeps")}
    cluster = _validate(path, "", {key: value for key, value in tree.items() if key not in over})
    known = {*grid.scale_names(), *scales, scale}
    for name, section in over["scales"].items():
        if name not in known:
            raise UserError(
                f"{path}: scales.{name} = {render(section)}: no scale; allowed is {', '.join(sorted(known))}"
            )
    for kind, sections in over.items():  # every section is checked, the ones of other sweeps too
        for name, section in sections.items():
            _validate(path, f"{kind}.{name}.", section)
    for section in (
        over["scales"].get(scale, {}),
        over["sweeps"].get(sweep, {}),
        over["sweeps"].get(f"{sweep}-{scale}", {}),
    ):
        cluster = _validate(path, "", cluster.model_dump() | section)
    return cluster


def of_sweep(path: Path | None, sweep: grid.Sweep) -> Cluster:
    """The resources of a sweep, which may have scales of its own beside it; the rest as in `load`."""
    return load(path, sweep.name, sweep.scale, grid.scale_names(sweep.path.parent / "scales"))


def _section(path: Path, tree: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    value = tree.get(kind) or {}
    if not isinstance(value, dict) or not all(isinstance(section, dict) for section in value.values()):
        raise UserError(f"{path}: {kind} = {render(value)}: allowed is a mapping of names to resources")
    return value


def _validate(path: Path, prefix: str, tree: Mapping[str, Any]) -> Cluster:
    for key, value in tree.items():
        if key not in Cluster.model_fields:
            allowed = ", ".join([*Cluster.model_fields, *(["scales", "sweeps"] if not prefix else [])])
            raise UserError(f"{path}: {prefix}{key} = {render(value)}: unknown key; allowed is {allowed}")
    try:
        cluster = Cluster.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {prefix}{explain(error, tree, Cluster)}") from None
    for option, value in cluster.sbatch.items():
        long = option.replace("_", "-")
        if long in RESERVED or long in OWN:
            why = f"stands in the key {OWN[long]} of this file" if long in OWN else "set by the launcher"
            raise UserError(f"{path}: {prefix}sbatch.{option} = {render(value)}: {why}; allowed is any other")
    return cluster
