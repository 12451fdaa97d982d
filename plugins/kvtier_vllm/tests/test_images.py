"""Images served by a real engine: what counts is what the model sees, whatever the image is called."""

from __future__ import annotations

import pytest
import tiny_blip
from real_engines import cpu_and_disk, prompt

TEXT = prompt(1, 150)
HEX = "ab" * 32  # as long as a digest


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    path = tmp_path_factory.mktemp("blip")
    tiny_blip.make(path)
    return path


def look(engine, seed, text=TEXT, *, name=None, salt=None, **options):
    """Ask about the image that the seed draws; the answer's log-probabilities, and what came from the cache."""
    asked = {"prompt_token_ids": text, "multi_modal_data": {"image": tiny_blip.image(seed)}}
    if name:
        asked["multi_modal_uuids"] = {"image": [name]}
    if salt:
        asked["cache_salt"] = salt
    if options:
        asked["mm_processor_kwargs"] = options
    (answer,) = engine.generate(asked)
    return answer


def test_images_that_a_counter_names_are_distinguished_after_a_restart(engine, blip, tmp_path):
    """Without a processor cache and a prefix cache, vLLM calls every engine's first image alike."""
    options = {"model": blip, "skip_tokenizer_init": False, "mm_processor_cache_gb": 0}
    plain = {"do_normalize": False}  # then the counter is hashed, and looks like a digest
    with engine(cpu_and_disk(tmp_path), **options) as first:
        plain_cat, cat = look(first, 1, **plain), look(first, 1)
        plain_dog = look(first, 2, salt="its own", **plain)
        assert min(plain_cat.differs(cat), plain_cat.differs(plain_dog)) > 0.1
        first.settle()
    with engine(cpu_and_disk(tmp_path), **options) as second:
        again = look(second, 2, **plain)
        assert again.differs(plain_dog) < 1e-4
        assert again.cached == 0
        for expected, again in [(plain_cat, look(second, 1, **plain)), (cat, look(second, 1))]:
            assert again.differs(expected) < 1e-4
            assert again.cached == 128


def test_items_that_the_engine_confused_under_one_name_are_not_stored(engine, blip, tmp_path, said):
    """A caller gave two images one name. The engine itself answers for the first; the next one must not."""
    other_text = prompt(2, 150)
    options = {"model": blip, "skip_tokenizer_init": False, "mm_processor_cache_gb": 0, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path), **options) as first:
        dog, dog_elsewhere = (look(first, 2, text, salt="its own") for text in (TEXT, other_text))
        cat = look(first, 1, name=HEX)
        said()
        assert look(first, 2, name=HEX).differs(cat) < 1e-4  # from the engine's prefix cache
        assert look(first, 2, other_text, name=HEX).differs(dog_elsewhere) > 0.1  # from its encoder cache
        first.settle()
        told = "\n".join(said())
    with engine(cpu_and_disk(tmp_path), **options) as second:
        for expected, text in [(dog, TEXT), (dog_elsewhere, other_text)]:
            again = look(second, 2, text, name=HEX)
            assert again.differs(expected) < 1e-4
            assert again.cached == 0
        again = look(second, 1, name="yet another")
        assert again.cached == 128
        assert again.differs(cat) < 1e-4
        # What came from the disk is the engine's own now, and goes on to be trusted.
        assert look(second, 1, [*TEXT, *prompt(3, 100)], name="yet another").cached == 160
        assert look(second, 1, [*TEXT, *prompt(3, 100)], name="one more").cached == 256
    assert "the engine may have cached another item's KV under the same name" in told
