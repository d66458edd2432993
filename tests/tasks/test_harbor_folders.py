"""Task folders: found, digested, and refused by name if they ask for what cannot be had."""

from pathlib import Path

import harbor_folders
import pytest

from rollart.tasks.harbor import images
from rollart.tasks.harbor.environment import rows_of
from rollart.tasks.harbor.folders import HarborTask, digest_of, find, read
from rollart.tasks.harbor.images import base_of
from rollart.types.errors import RequestError

PLAIN = harbor_folders.TASKS["hello"]


def folder(tmp_path: Path, toml: str = harbor_folders.OFFLINE, **files: str) -> Path:
    more = {name.replace("__", "/"): text for name, text in files.items()}
    return harbor_folders.write({**PLAIN, "task.toml": toml, **more}, tmp_path / "hello")


def played(path: Path, **settings: object) -> HarborTask:
    return read(path, roots={}, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[environment]", "environment.network_mode is missing, which means 'public': sandboxes have no network"),
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode is 'public'"),
        ("[environment]\nallow_internet = true", "environment.network_mode is 'public'"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode is 'allowlist'"),
        ('[agent]\nallowed_hosts = ["pypi.org"]', "agent.allowed_hosts: sandboxes have no network"),
        ('[environment]\nnetwork_mode = "no-network"\nallowed_hosts = ["a"]', "environment.allowed_hosts: sandboxes"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\nos = "windows"', "environment.os is 'windows'"),
        ("[environment.tpu]\ntype = 'v6e'", "environment.tpu is not supported"),
        ("[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers is not supported"),
        ("[environment.healthcheck]\ncommand = 'a'", "environment.healthcheck is not supported"),
        ("[environment]\nskills_dir = '/s'", "environment.skills_dir is not supported"),
        ("[environment]\nworkdir = 'app'", "environment.workdir is 'app', which is not an absolute path"),
        ('[environment.env]\nKEY = "${HOME}"', "environment.env.KEY takes '${HOME}' from the machine's environment"),
        ('[verifier.env]\nKEY = "${A:-b}"', "verifier.env.KEY takes"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier.environment contradicts"),
        ("[[verifier.collect]]\ncommand = 'a'\nservice = 'db'", "there is no service 'db'"),
        ("[[verifier.collect]]\ncommand = 'a'\nuser = 'root'", "verifier.collect: `user` is not supported"),
        ("[[steps]]\nname = 'one'", "[[steps]]: tasks of several steps are not supported"),
        ("artifacts = ['out']", "artifacts: 'out' is not the absolute path"),
        ("artifacts = ['/']", "artifacts: '/' is not the absolute path"),
        ("artifacts = [{source = '/a', exclude = ['b']}]", "`exclude` of '/a' is not supported"),
        ("artifacts = [{source = '/a', service = 'db'}]", "of the service 'db'"),
        ("schema_version = '2.0'", "schema_version is '2.0'"),
        ("[agnet]", "agnet: unknown key (did you mean agent?)"),
        ("[environment]\nmemory_gb = 3", "environment.memory_gb: unknown key (did you mean memory_mb?)"),
        ("[environment]\nmemory = 'much'", "memory is 'much'"),
        ("[verifier]\ntimeout_sec = 'x'", "verifier.timeout_sec"),
        ("a = ", "Invalid value"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(RequestError, match="Harbor task hello: ") as refused:
        played(folder(tmp_path, toml))
    assert said in str(refused.value)


def test_all_reasons_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gpus.*; .*skills_dir"):
        played(folder(tmp_path, "[environment]\ngpus = 1\nskills_dir = '/s'"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("environment/docker-compose.yaml", "environment/docker-compose.yaml: only single containers"),
        ("environment/.dockerignore", "environment/.dockerignore: it is not supported"),
        ("tests/.dockerignore", "tests/.dockerignore: it is not supported"),
        ("tests/.harborignore", "tests/.harborignore: it is not supported"),
        ("trajectory.json", "a conversation to continue is not supported"),
    ],
)
def test_files_that_change_the_meaning_are_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(RequestError, match="Harbor task hello") as refused:
        played(folder(tmp_path, **{name: "x"}))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path)
    (path / name).unlink()
    with pytest.raises(RequestError, match=f"{name} is missing"):
        played(path)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tests" / "leak").symlink_to("/etc/passwd")
    with pytest.raises(RequestError, match="tests/leak is a link that leaves tests"):
        played(path)


def test_tasks_without_network_by_choice(tmp_path: Path) -> None:
    task = played(folder(tmp_path, '[environment]\nnetwork_mode = "public"\nmemory = "2G"'), offline=True)
    assert task.agent.table.memory_mb == 2048


def test_what_a_task_says(tmp_path: Path) -> None:
    task = played(folder(tmp_path))
    assert task.instruction == "Write hello to hello.txt."  # without the canary
    assert (task.mode, task.own_tests, task.with_workdir) == ("shared", False, False)
    asked = played(task.folder, undeclared_mode="separate")
    assert (asked.mode, asked.with_workdir) == ("separate", True)
    declared = harbor_folders.write(harbor_folders.TASKS["own-verifier"], tmp_path / "own")
    own = played(declared)
    assert own.own_tests
    assert own.verifier.image.digest != own.agent.image.digest
    assert own.artifacts == ("/logs/artifacts", "/app/answer")


def test_folders_are_found(tmp_path: Path) -> None:
    harbor_folders.write_all(tmp_path)
    (tmp_path / "notes").mkdir()
    assert list(find(tmp_path)) == sorted(harbor_folders.TASKS)
    assert list(find(tmp_path / "hello")) == ["hello"]
    for wrong in (tmp_path / "notes", tmp_path / "nowhere", tmp_path / "hello" / "task.toml"):
        with pytest.raises(RequestError):
            find(wrong)


def test_a_row_is_the_content_of_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (row,) = rows_of(str(path))
    moved = path.rename(tmp_path / "other")
    (again,) = rows_of(str(moved))
    assert row["digest"] == again["digest"] != ""
    (moved / "tests" / "test.sh").chmod(0o644)
    assert digest_of(moved) != row["digest"]


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "host_python", lambda: "3.11.2")
    monkeypatch.setattr(images, "debian_release", lambda: "12")
    for known in ("python", "python:3", "python:3.11", "python:3.11-slim-bookworm", "python:3.11.9", "python:slim"):
        assert base_of(known, {}) == ("host", True)
    for known in ("debian", "debian:12", "debian:12.5-slim", "debian:bookworm-20250101", "docker.io/library/debian"):
        assert base_of(known, {}) == ("host", False)
    for other in ("python:3.12-slim", "python:2.7", "python:alpine", "debian:trixie", "debian:11", "ubuntu:24.04"):
        with pytest.raises(RequestError, match=r"environment_settings\.roots"):
            base_of(other, {})
        assert base_of(other, {f"{other}*": str(tmp_path)}).folder == str(tmp_path)
    with pytest.raises(RequestError, match="is no folder"):
        base_of("ubuntu", {"ubuntu*": str(tmp_path / "none")})


def test_a_machine_without_python_or_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "host_python", lambda: "")
    monkeypatch.setattr(images, "debian_release", lambda: "")
    for image in ("python:3.11", "debian"):
        with pytest.raises(RequestError, match="this machine"):
            base_of(image, {})
