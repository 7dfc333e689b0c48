"""Models of transformers, peft and diffusers, from tiny configurations: nothing is downloaded.

Dropout is off, since each rank draws its own, but in wav2vec2, which has its default LayerDrop.
"""

from typing import Any

import torch
import transformers as hf
from diffusers import UNet2DModel
from diffusers.models import DiTTransformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from .model import Model, Wrapped, Zoo

WIDTH, VOCABULARY, LENGTH = 32, 64, 8
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def tokens(size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, LENGTH))


def _text(size: int) -> tuple[Tensor, ...]:
    inputs = tokens(size)
    return inputs, inputs


def _images(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 3, 8, 8), torch.arange(size) % 4


def causal(cls: Any, config: Any, note: str = "", *, is_mean: bool = True, **more: Any) -> Model:
    def make() -> Wrapped:
        return Wrapped(cls(config(**{**_SIZES, **more})), "input_ids", "labels")

    return Model(make, _text, note, is_mean=is_mean)


def _checkpointed() -> Wrapped:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Wrapped(model, "input_ids", "labels")


def _lora() -> Wrapped:
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return Wrapped(get_peft_model(_gpt2().model, config), "input_ids", "labels")


def _gpt2() -> Wrapped:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return Wrapped(model, "input_ids", "labels")


def _bert() -> Wrapped:
    config = hf.BertConfig(**_SIZES, **_NO_DROPOUT, num_labels=4)
    return Wrapped(hf.BertForSequenceClassification(config), "input_ids", "labels")


def _t5() -> Wrapped:
    config = hf.T5Config(
        d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Wrapped(hf.T5ForConditionalGeneration(config), "input_ids", "labels")


def _bart() -> Wrapped:
    config = hf.BartConfig(
        d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    return Wrapped(hf.BartForConditionalGeneration(config), "input_ids", "labels")


def _vit() -> Wrapped:
    sizes = {name: value for name, value in _SIZES.items() if "vocab" not in name and "position" not in name}
    return Wrapped(
        hf.ViTForImageClassification(hf.ViTConfig(**sizes, **_NO_DROPOUT, **_VISION, num_labels=4)),
        "pixel_values",
        "labels",
    )


def _swin() -> Wrapped:
    config = hf.SwinConfig(
        **_VISION | {"image_size": 16, "patch_size": 2}, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4,
        num_labels=4, drop_path_rate=0.0, **_NO_DROPOUT,
    )  # fmt: skip
    return Wrapped(hf.SwinForImageClassification(config), "pixel_values", "labels")


class CLIP(Zoo):
    """With its loss over the samples of a rank's batch."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {name: value for name, value in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
        text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
        self.model = hf.CLIPModel(
            hf.CLIPConfig(text_config=text, vision_config={**sizes, **_VISION}, projection_dim=16)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        text, images = batch
        found = self.model(input_ids=text, pixel_values=images)
        # A mean over samples, which CLIP's own loss, over all pairs of a batch, is not.
        return nn.functional.mse_loss(found.text_embeds, found.image_embeds) * self.model.logit_scale.exp()


class Whisper(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.model = hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                d_model=WIDTH,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=VOCABULARY,
                num_mel_bins=8,
                max_source_positions=8,
                max_target_positions=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                dropout=0.0,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sounds, labels = batch
        return self.model(input_features=sounds, labels=labels).loss


class Wav2Vec2(Zoo):
    def __init__(self, **more: float) -> None:
        super().__init__()
        config = hf.Wav2Vec2Config(
            hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
            conv_kernel=(4, 4), conv_stride=(4, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
            vocab_size=VOCABULARY, mask_time_prob=0.0, num_labels=4, classifier_proj_size=16, **more,
        )  # fmt: skip
        self.model = hf.Wav2Vec2ForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sounds, classes = batch
        return self.model(input_values=sounds, labels=classes).loss


_DROPOUTS = "layerdrop hidden_dropout attention_dropout activation_dropout feat_proj_dropout final_dropout"
_WITHOUT = dict.fromkeys(_DROPOUTS.split(), 0.0)


def _sounds(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 256), torch.arange(size) % 4


class Diffusion(Zoo):
    """Predicts the noise, which the data bring along."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, noise, times, *labels = batch
        found = self.model(images + noise, times, **({"class_labels": labels[0]} if labels else {})).sample
        return nn.functional.mse_loss(found, noise)


def _noisy(channels: int, *, labelled: bool) -> Any:
    def data(size: int) -> tuple[Tensor, ...]:
        found = torch.randn(size, channels, 8, 8), torch.randn(size, channels, 8, 8), torch.arange(size) % 100
        return (*found, torch.arange(size) % 4) if labelled else found

    return data


def _unet() -> nn.Module:
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def _dit() -> nn.Module:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=4, dropout=0.0,
    )  # fmt: skip
    for part in model.modules():  # it leaves out labels at random
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    return model


MODELS = {
    "GPT-2": Model(_gpt2, _text),
    "Llama": causal(hf.LlamaForCausalLM, hf.LlamaConfig),
    "Llama, GQA, tied": causal(
        hf.LlamaForCausalLM, hf.LlamaConfig, "2 heads of keys for 4", num_key_value_heads=2, tie_word_embeddings=True
    ),
    "Llama, checkpointed": Model(_checkpointed, _text, "activation checkpointing"),
    "Qwen3": causal(hf.Qwen3ForCausalLM, hf.Qwen3Config, num_key_value_heads=2, head_dim=8),
    "Mistral": causal(hf.MistralForCausalLM, hf.MistralConfig, num_key_value_heads=2),
    "Gemma": causal(hf.GemmaForCausalLM, hf.GemmaConfig, num_key_value_heads=1, head_dim=8),
    "Mixtral": causal(
        hf.MixtralForCausalLM, hf.MixtralConfig, "4 experts, no router loss", num_key_value_heads=2, num_local_experts=4
    ),
    "Mixtral, router loss": causal(
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        "which is no mean over samples",
        is_mean=False,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    ),
    "Falcon": causal(hf.FalconForCausalLM, hf.FalconConfig, "one head of keys and values", multi_query=True),
    "Phi": causal(hf.PhiForCausalLM, hf.PhiConfig, resid_pdrop=0.0),
    "GPT-NeoX": causal(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig),
    "BERT": Model(_bert, lambda size: (tokens(size), torch.arange(size) % 4)),
    "T5": Model(_t5, _text),
    "BART": Model(_bart, _text),
    "ViT": Model(_vit, _images),
    "Swin": Model(_swin, lambda size: (torch.randn(size, 3, 16, 16), torch.arange(size) % 4)),
    "CLIP": Model(CLIP, lambda size: (tokens(size), torch.randn(size, 3, 8, 8)), "a 0-d scale"),
    "Whisper": Model(Whisper, lambda size: (torch.randn(size, 8, 16), tokens(size))),
    "wav2vec2": Model(Wav2Vec2, _sounds, "its default LayerDrop", is_random=True),
    "wav2vec2, all layers": Model(lambda: Wav2Vec2(**_WITHOUT), _sounds, "no LayerDrop"),
    "LoRA on GPT-2": Model(_lora, _text, "peft"),
    "UNet2D": Model(lambda: Diffusion(_unet()), _noisy(3, labelled=False), "diffusers"),
    "DiT 2D": Model(lambda: Diffusion(_dit()), _noisy(4, labelled=True), "diffusers"),
}
