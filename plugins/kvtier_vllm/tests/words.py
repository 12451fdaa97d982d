"""A tokenizer in which the token 12 is the word w12, for what vLLM does only with one."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 2  # as in the tiny models


def tokenizer(vocabulary: int, **special: int) -> PreTrainedTokenizerFast:
    """Words from w0 on, except for special tokens, which have the words and numbers of the arguments."""
    names = {0: "<unk>", END: "<end>"} | {number: f"<{name}>" for name, number in special.items()}
    words = {names.get(number, f"w{number}"): number for number in range(vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>", pad_token="<unk>")
