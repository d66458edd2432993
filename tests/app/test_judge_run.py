"""A judge behind `rollart serve`: a model that learned to write judgements scores the episodes of a task."""

import asyncio
from pathlib import Path

import pytest
import torch
from served import KEY, serving, tiny_checkpoint
from test_rewards_run import Echo
from transformers import AutoModelForCausalLM

import rollart
from rollart.app.serving.model import open_model
from rollart.app.transcript_store import read_transcripts
from rollart.observe.journal import read_journal
from rollart.types.journal import TrajectoryEnded
from rollart.types.trajectory import TRAINABLE, Outcome

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'rollart[serve]'")
JUDGEMENT = "score=7"  # no letter twice: a model of one layer can learn it
TEMPLATE = "{{final_text}}"


def judging_model(folder: Path) -> Path:
    """A tiny model that answers whatever it reads with the same judgement."""
    tiny_checkpoint(folder, hidden_size=32, max_position_embeddings=512)
    with open_model(folder) as served:
        conversations = served.conversations
        answer = [*conversations.encode(JUDGEMENT), conversations.stop_tokens[0]]
        texts = ["", "a", "say it", "xyzzy 12", "what is left of the tree", "!?", "Qq", "....", "hello there", "0 1 2"]
        prompts = [conversations.render([("user", text)]) for text in texts]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        for prompt in prompts:
            ids = torch.tensor([[*prompt, *answer]])
            labels = ids.clone()
            labels[0, : len(prompt)] = -100
            model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    return folder


def judges(folder: Path, url: str) -> Path:
    """Two judges: one reads the judgements of the model, the other wants JSON."""
    common = f'factory = "rollart.backends.rewards.judge:Judge"\nbase_url = "{url}"\nmodel = "judge"\nmax_tokens = 16\n'
    common += f'secret = "ROLLART_API_KEY"\ntemplate = "{TEMPLATE}"\n'
    file = folder / "judges.toml"
    file.write_text(f"[helpful]\n{common}parse = 'pattern'\npattern = 'score=(.*)'\n[confused]\n{common}")
    return file


def run(folder: Path, rewards: list, steps: int) -> rollart.Result:
    task = rollart.Task(Echo, rewards=rewards, max_turns=2, max_turn_tokens=8, environments=8)
    return rollart.run(
        tasks={"echo": task},
        model=rollart.tiny_model(),
        batch={"trajectories": 8, "group_size": 4},
        steps=steps,
        out=folder,
    )


@pytest.mark.timeout(280)
def test_a_judge_behind_rollart_serve_scores_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLART_API_KEY", KEY)
    model = judging_model(tmp_path / "judge")
    with serving(model, "--name", "judge", cwd=tmp_path) as process:
        file = judges(tmp_path, process.url)
        run(tmp_path / "run", [{"function": f"{file}:helpful"}], 2)
        stored = [each for each in read_transcripts(tmp_path / "run" / "transcripts") if each.outcome in TRAINABLE]
        assert len(stored) >= 16
        assert {each.reward for each in stored} == {0.7}
        with pytest.raises(rollart.RunError, match="malformed judgement"):
            run(tmp_path / "confused", [{"function": f"{file}:confused"}], 1)
        ended = [
            each for each in read_journal(tmp_path / "confused" / "journal.sqlite") if isinstance(each, TrajectoryEnded)
        ]
        assert sum(each.outcome is Outcome.REWARD_FAILED for each in ended) >= 8
        assert not any(each.outcome in TRAINABLE for each in ended)


@pytest.mark.timeout(280)
def test_the_openai_client_streams_the_judgement(tmp_path):
    openai = pytest.importorskip("openai")
    with serving(judging_model(tmp_path / "judge"), "--name", "judge", cwd=tmp_path) as process:

        async def stream() -> str:
            client = openai.AsyncOpenAI(base_url=process.url, api_key=KEY)
            chunks = await client.chat.completions.create(
                model="judge", messages=[{"role": "user", "content": "a"}], stream=True, temperature=0, max_tokens=16
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

        assert asyncio.run(stream()) == JUDGEMENT
