"""Ten small tasks in Harbor's format, which use what is supported of it in different ways."""

from collections.abc import Mapping
from pathlib import Path

from rollart.tasks.harbor.images import host_python

Files = Mapping[str, str]
OFFLINE = '[environment]\nnetwork_mode = "no-network"\n'
FROM = f"FROM python:{'.'.join(host_python().split('.')[:2]) or '3'}-slim"
PASSED = "mkdir -p /logs/verifier\nif {0}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def script(text: str) -> str:
    return f"#!/bin/bash\n{text}\n"


def task(
    toml: str = OFFLINE, *, dockerfile: str, solve: str, test: str, instruction: str = "Do it.", **more: str
) -> Files:
    return {
        "task.toml": f'schema_version = "1.4"\n{toml}',
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "solution/solve.sh": script(solve),
        "tests/test.sh": script(test),
    } | {name.replace("__", "/"): text for name, text in more.items()}


TASKS: Mapping[str, Files] = {
    "hello": task(
        dockerfile=f"{FROM}\nWORKDIR /app",
        solve="echo hello > hello.txt",
        test=PASSED.format('[ "$(cat /app/hello.txt)" = hello ]'),
        instruction="<!-- canary 1234 -->\n\nWrite hello to hello.txt.",
    ),
    "variables": task(
        dockerfile=f'{FROM}\nENV PLACE=/srv/app GREETING="good day"\nWORKDIR $PLACE\nRUN echo "$GREETING" \\\n'
        "  # a comment between lines\n  > greeting.txt",
        solve="tr a-z A-Z < greeting.txt > $PLACE/loud.txt",
        test=PASSED.format('[ "$(cat loud.txt)" = "GOOD DAY" ]'),
    ),
    "copies": task(
        dockerfile=f"{FROM}\nWORKDIR /app\nCOPY data/ ./data\n"
        'COPY ["one.txt", "two.txt", "texts/"]\nRUN ["mkdir", "out"]',
        solve="cat data/deep/number texts/*.txt > out/all",
        test=PASSED.format("[ \"$(cat /app/out/all | tr '\\n' ' ')\" = '7 one two ' ]"),
        **{"environment/data/deep/number": "7\n", "environment/one.txt": "one\n", "environment/two.txt": "two\n"},
    ),
    "separate-folder": task(
        f'artifacts = ["/app/out"]\n[verifier]\nenvironment_mode = "separate"\ntimeout_sec = 60\n{OFFLINE}',
        dockerfile=f"{FROM}\nWORKDIR /app\nRUN mkdir out && echo stale > out/old",
        solve="rm out/old; mkdir out/a; echo 5 > out/a/five",
        test=PASSED.format('[ "$(cat /app/out/a/five)" = 5 ] && [ ! -e /app/out/old ]'),
    ),
    "separate-file": task(
        f'artifacts = ["/app/run.sh"]\n[verifier]\nenvironment_mode = "separate"\n{OFFLINE}',
        dockerfile=f"{FROM}\nWORKDIR /app\nCOPY run.sh .",
        solve="sed -i s/1/2/ run.sh; echo planted > /app/helper; mkdir -p /root && echo exit > /root/.bashrc",
        test=PASSED.format('[ "$(bash /app/run.sh)" = 2 ] && [ ! -e /app/helper ] && [ ! -e /root/.bashrc ]'),
        **{"environment/run.sh": "echo 1\n"},
    ),
    "collected": task(
        f'[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\n'
        f'command = "cp /app/state /logs/artifacts/state"\n{OFFLINE}',
        dockerfile=f"{FROM}\nWORKDIR /app",
        solve="echo running > state",
        test=PASSED.format("grep -q running /logs/artifacts/state"),
    ),
    "own-verifier": task(
        f'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n{OFFLINE}',
        dockerfile="FROM debian\nWORKDIR /app",
        solve="echo 42 > answer",
        test=PASSED.format("diff -q /app/answer /tests/expected > /dev/null"),
        **{"tests/Dockerfile": "FROM debian\nCOPY . /tests/\nRUN chmod +x /tests/test.sh", "tests/expected": "42\n"},
    ),
    "metrics": task(
        dockerfile=f"{FROM}\nWORKDIR /app\nRUN python -c 'print(6 * 7)' > question",
        solve="cp question answer",
        test="mkdir -p /logs/verifier\npython3 /tests/grade.py > /logs/verifier/reward.json",
        **{
            "tests/grade.py": "import json, pathlib\nright = pathlib.Path('/app/answer').is_file()\n"
            "print(json.dumps({'speed': 0.5, 'reward': float(right)}))\n"
        },
    ),
    "users": task(
        f'[agent]\ntimeout_sec = 120.0\n[verifier]\nuser = "root"\n{OFFLINE}workdir = "/home/agent"\n',
        dockerfile="FROM debian\nRUN id -u > /srv/built-by\nUSER agent\nRUN id -u > /tmp/then-by",
        solve="{ id -u; pwd; } > mine",
        test=PASSED.format(
            "[ \"$(cat /home/agent/mine /srv/built-by /tmp/then-by | tr '\\n' ' ')$(id -u)\" = "
            "'1000 /home/agent 0 1000 0' ]"
        ),
    ),
    "environment": task(
        f'[solution.env]\nSECRET = "s3"\n[verifier.env]\nEXPECTED = "s3/blue"\n{OFFLINE}memory_mb = 256\n'
        'storage_mb = 64\n[environment.env]\nCOLOUR = "blue"\n[metadata]\nauthor = "nobody"\n',
        dockerfile=f"{FROM}\nENV COLOUR red\nWORKDIR /app",
        solve='echo "$SECRET/$COLOUR" > out',
        test=PASSED.format('[ "$(cat out)" = "$EXPECTED" ]'),
    ),
}


def write(files: Files, folder: Path) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
    return folder


def write_all(folder: Path) -> Path:
    for name, files in TASKS.items():
        write(files, folder / name)
    return folder
