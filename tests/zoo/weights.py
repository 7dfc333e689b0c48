"""Weights of folders whose names transformers converts: what `read_weights` reads is what `from_pretrained` does.

`make zoo` runs this, since it needs transformers: ``python -m pytest tests/zoo/weights.py``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from polyphase.engine import read_weights
from polyphase.engine.initialization import read_stored

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
_VISION = {**_SIZES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
State = dict[str, Tensor]


def bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**_SIZES))


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2))


def gpt2_base() -> hf.PreTrainedModel:
    return hf.GPT2Model(hf.GPT2Config(**_GPT2))


def llava() -> hf.PreTrainedModel:
    text = {**_SIZES, "model_type": "llama", "num_key_value_heads": 4}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=_VISION))


def wav2vec2() -> hf.PreTrainedModel:
    convolutions = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
    sizes = {**_SIZES, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(**sizes, **convolutions))


def mixtral() -> hf.PreTrainedModel:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=4, num_key_value_heads=4))


def renamed(*pairs: tuple[str, str]) -> Callable[[State], State]:
    def rename(state: State) -> State:
        for old, new in pairs:
            state = {key.replace(old, new): value for key, value in state.items()}
        return state

    return rename


def without_head(state: State) -> State:
    return {key: value for key, value in state.items() if key != "lm_head.weight"}


_OLD_LLAVA = renamed(
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
_OLD_NORMS = renamed(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
_OLD_WEIGHT_NORM = renamed(
    ("parametrizations.weight.original0", "weight_g"), ("parametrizations.weight.original1", "weight_v")
)


def _write(folder: Path, model: hf.PreTrainedModel, change: Callable[[State], State]) -> None:
    model.config.save_pretrained(folder)
    state = {name: value.clone().contiguous() for name, value in change(model.state_dict()).items()}
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("written", "build", "change"),
    [
        (bert, bert, _OLD_NORMS),
        (gpt2_base, gpt2, dict),
        (gpt2, gpt2_base, without_head),
        (llava, llava, _OLD_LLAVA),
        (llava, llava, dict),
        (wav2vec2, wav2vec2, _OLD_WEIGHT_NORM),
    ],
)
def test_read_as_from_pretrained_does(written, build, change, tmp_path):
    torch.manual_seed(5)
    _write(tmp_path, written(), change)
    model = read_weights(tmp_path, build)
    read_stored(model)
    expected = type(model).from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


def test_experts_that_are_put_together_are_to_be_written_so(tmp_path):
    mixtral().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"makes 'model.layers.0.mlp.experts.\w+' of MixtralForCausalLM from .*=False"):
        read_weights(tmp_path, mixtral)
    expected = hf.MixtralForCausalLM.from_pretrained(tmp_path)
    expected.save_pretrained(tmp_path / "whole", save_original_format=False)
    model = read_weights(tmp_path / "whole", mixtral)
    read_stored(model)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_one_name_for_two_keys_and_a_key_too_many(tmp_path):
    _write(tmp_path, gpt2_base(), lambda state: {**state, "transformer.ln_f.bias": torch.zeros(32)})
    with pytest.raises(
        ValueError, match=r"'ln_f.bias' and 'transformer.ln_f.bias' are both 'transformer.ln_f.bias' of"
    ):
        read_weights(tmp_path, gpt2)
    _write(tmp_path, gpt2(), dict)
    with pytest.raises(ValueError, match=r"It has 'lm_head.weight'|it has 'lm_head.weight', which GPT2Model does not"):
        read_weights(tmp_path, gpt2_base)
    read_weights(tmp_path, gpt2_base, ignore=["lm_head.*"])
