"""Texts and bytes of single tokens, in vocabularies of bytes and of SentencePiece."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from specctl.gateway.token_text import TokenTexts

TEXT = "Zwölf  Bäume\n日本語 🙂 \ufffd, end"


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer like Llama 2's: words carry the space before them, and unknown characters become bytes."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", *"Band", "▁B", "▁Ba", "▁a"]
    merges = [("▁", "B"), ("▁B", "a"), ("▁", "a")]
    vocabulary = {name: id for id, name in enumerate(names)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_bytes_of_tokens_add_up_to_the_text(target, pieces):
    """Parts of a character had the bytes of U+FFFD."""
    for tokenizer, start in ((target.tokenizer, ""), (pieces, " ")):
        texts = TokenTexts(tokenizer)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        assert bytes(byte for id in ids for byte in texts.bytes(id)).decode() == start + TEXT
        assert any("\ufffd" in texts.text(id) for id in ids), "no character is in parts"


def test_tokens_keep_their_space(pieces):
    """Decoded alone, words of SentencePiece lose their space, and all text offsets after them were too small."""
    texts = TokenTexts(pieces)
    assert [texts.text(id) for id in pieces.encode("Ba a B")] == [" Ba", " a", " B"]
