"""`rollart deploy`: what starts a run on Kubernetes, on Slurm, or on a Ray cluster that takes jobs."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollart.app.launch.files import named_files, read_files
from rollart.app.launch.groups import CPUS, GPUS, NodeSize, dns_name, node_groups
from rollart.app.launch.kuberay import KubeSettings, manifest
from rollart.app.launch.ray_job import as_shell, job_command, submit
from rollart.app.launch.slurm import SlurmSettings, script
from rollart.app.launch.yaml_text import to_yaml
from rollart.app.running import RuntimeKind, require
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Write what starts a run on Kubernetes, on Slurm, or as a Ray Job.")

ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the run.")]
Out = Annotated[Path | None, typer.Option(help="File to write, for this user alone; by default standard output.")]
GpusPerNode = Annotated[int, typer.Option(min=0, help="GPUs of a machine; engines of a pool share it.")]
CpusPerNode = Annotated[int, typer.Option(min=2, help="CPUs of a machine, one of them for Ray.")]


@app.command()
def kuberay(
    config: ConfigFile,
    image: Annotated[str, typer.Option(help="Container image with rollart[train] and ray[default].")],
    name: Annotated[str, typer.Option(help="Name of the job and of its run folder; by default the config's.")] = "",
    out: Out = None,
    gpus_per_node: GpusPerNode = GPUS,
    cpus_per_node: CpusPerNode = CPUS,
    node_selector: Annotated[
        list[str] | None, typer.Option(help="Machines of a pool, instead of by its accelerator: POOL:LABEL=VALUE.")
    ] = None,
    code: Annotated[
        str, typer.Option(help="Folder of the image with your code; by default it is in the manifest.")
    ] = "",
    include: Annotated[list[str] | None, typer.Option(help="Another file for the manifest. Repeatable.")] = None,
    secret: Annotated[str, typer.Option(help="Existing Secret with the token as auth_token.")] = "",
    claim: Annotated[str, typer.Option(help="Existing PersistentVolumeClaim for run folders.")] = "",
    storage: Annotated[str, typer.Option(help="Size of the claim that the manifest makes.")] = "100Gi",
    retries: Annotated[int, typer.Option(min=0, help="New clusters that resume the run after a failure.")] = 3,
) -> None:
    """Write a RayJob for KubeRay 1.6 or newer, with its token, files and volume.

    Example: rollart deploy kuberay my.toml --image registry/rollart:1 --out job.yaml && kubectl apply -f job.yaml
    """
    require(RuntimeKind.RAY)
    checked = _read(config)
    files = read_files([config.name, *([] if code else named_files(checked)), *(include or [])])
    settings = KubeSettings(
        image, dns_name(name or checked.name), _selectors(node_selector or []), code, secret, claim, storage, retries
    )
    groups = node_groups(checked, NodeSize(gpus_per_node, cpus_per_node))
    _write(out, to_yaml(manifest(checked, config.name, files, groups, settings)))


@app.command()
def slurm(
    config: ConfigFile,
    run: Annotated[Path, typer.Option(help="Run folder, on a disk that all machines share; resumed if it exists.")],
    out: Out = None,
    gpus_per_node: GpusPerNode = GPUS,
    cpus_per_node: CpusPerNode = CPUS,
    time: Annotated[str, typer.Option(help="Time limit; the job is requeued and resumes the run.")] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Further option of sbatch, for all or for a pool: POOL:--partition=gpu. Repeatable."),
    ] = None,
    python: Annotated[str, typer.Option(help="Interpreter on the machines; by default this one.")] = sys.executable,
) -> None:
    """Write a batch script for Slurm; this folder and the run's must be on a disk that all machines share.

    Example: rollart deploy slurm my.toml --run runs/first --time 12:00:00 --out job.sh && sbatch job.sh
    """
    checked = _read(config)
    settings = SlurmSettings(
        checked.name,
        str(config.absolute()),
        str(run.absolute()),
        str(Path.cwd()),
        python,
        time,
        _options(sbatch or []),
    )
    groups = node_groups(checked, NodeSize(gpus_per_node, cpus_per_node))
    _write(out, script(checked, groups, settings))


@app.command("ray-job")
def ray_job(
    config: ConfigFile,
    run: Annotated[str, typer.Option(help="Run folder on the head's disk, absolute; resumed if it exists.")],
    address: Annotated[
        str, typer.Option(help="URL of the cluster's job server, or auto: the trial cluster's.")
    ] = "auto",
    submit_: Annotated[bool, typer.Option("--submit", help="Submit the job, and follow it to its end.")] = False,
) -> None:
    """Print the command that submits a run to a Ray cluster, or submit it. The token is in RAY_AUTH_TOKEN.

    Example: rollart deploy ray-job my.toml --run /data/first --address http://10.0.0.1:8265 --submit
    """
    require(RuntimeKind.RAY)
    from rollart.distributed import trial_cluster

    _read(config)
    if config.is_absolute() or ".." in config.parts:
        raise RequestError(f"{config} is outside of this folder, which is what travels; start from the config's folder")
    variables = {}
    if address == "auto":
        trial = trial_cluster.read()
        if trial is None or not trial.jobs:
            raise RequestError("no trial cluster takes jobs here; start one with `rollart cluster up --jobs`")
        address, variables = trial.jobs, {trial_cluster.TOKEN_VARIABLE: trial.token}
    command = job_command(str(config), run, address, Path.cwd())
    if not submit_:
        sys.stdout.write(as_shell(command) + "\n")
        return
    trial_cluster.check_jobs()
    raise typer.Exit(submit(command, variables, os.environ))


def _read(config: Path) -> RunConfig:
    return check(RunConfig, load_toml(config))


def _selectors(given: list[str]) -> dict[str, dict[str, str]]:
    """From `POOL:LABEL=VALUE`; a label may have colons of its own."""
    found: dict[str, dict[str, str]] = {}
    for each in given:
        pool, colon, label = each.partition(":")
        key, equals, value = label.partition("=")
        if not (pool and colon and key and equals):
            raise RequestError(f"--node-selector {each!r} is not POOL:LABEL=VALUE")
        found.setdefault(pool, {})[key] = value
    return found


def _options(given: list[str]) -> dict[str, list[str]]:
    """From `POOL:--option=value`, or `--option=value` for all."""
    found: dict[str, list[str]] = {}
    for each in given:
        pool, option = ("", each) if each.startswith("-") else (each.partition(":")[0], each.partition(":")[2])
        if not option.startswith("-"):
            raise RequestError(f"--sbatch {each!r} is not an option of sbatch, or POOL:OPTION")
        found.setdefault(pool, []).append(option)
    return found


def _write(out: Path | None, text: str) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # a file that was there has a mode of its own
            file.write(text)
    except OSError as error:
        raise RequestError(f"--out {out}: {error}") from error
