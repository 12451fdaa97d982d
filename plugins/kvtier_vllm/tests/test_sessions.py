"""Sessions, to whose prompt more is added while they run: nothing that is known of one at first holds later."""

from __future__ import annotations

import pytest
import tiny_blip
from real_engines import cpu, prompt

OPENING, QUESTION = prompt(1, 40), prompt(2, 150)


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    path = tmp_path_factory.mktemp("blip")
    tiny_blip.make(path)
    return path


class Session:
    """A prompt that comes in pieces, as vLLM's server hands them to its engine."""

    def __init__(self, engine, name, salt):
        self._llm = engine.llm.llm_engine
        self._core = self._llm.engine_core.engine_core
        self._name, self._salt = name, salt

    def add(self, text, tokens, **data):
        from vllm import SamplingParams

        asked = self._llm.input_processor.process_inputs(
            self._name,
            {"prompt_token_ids": list(text), "cache_salt": self._salt, **({"multi_modal_data": data} if data else {})},
            SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True),
            supported_tasks=("generate",),
            resumable=True,
        )
        self._core.add_request(*self._core.preprocess_add_request(asked))

    def step(self):
        """The log-probabilities of what the engine answered in a step."""
        outputs, _ = self._core.step()
        answers = [answer for group in outputs.values() for answer in group.outputs]
        return [row[0] for answer in answers for row in answer.new_logprobs.logprobs]

    def answer(self, tokens):
        said = []
        while len(said) < tokens:
            said += self.step()
        return said

    def close(self):
        self._core.abort_requests([self._name])


def ask_about(engine, seed, name, salt, *, preempted=False):
    session = Session(engine, name, salt)
    session.add(OPENING, 1)
    session.answer(1)
    session.add(QUESTION, 4, image=tiny_blip.image(seed))
    said = session.step()
    if preempted:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    said += session.answer(4 - len(said))
    session.close()
    return said


def test_a_preempted_session_does_not_find_the_image_of_another(engine, blip, said):
    """What lies in a prompt is asked when it comes, and the image comes later."""
    with engine(cpu(), model=blip, skip_tokenizer_init=False) as served:
        expected = ask_about(served, 2, "reference", "its own")
        cat = ask_about(served, 1, "cat", "shared")
        served.settle()
        dog = ask_about(served, 2, "dog", "shared", preempted=True)
        assert max(abs(a - b) for a, b in zip(cat, expected, strict=True)) > 0.1
        assert dog == pytest.approx(expected, abs=1e-4)
        assert "it is a session: its prompt is extended later" in "\n".join(said())
