"""Arguments for small configurations of models that check sizes against each other, or have other names for them."""

from typing import Any

_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "index_topk": 16,
    "index_kpool": 4,
    "index_head_dim": 8,
    "index_n_heads": 4,
}
_VISION = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
}
# A loaded configuration computes the last size from the first.
_STEP_VISION = _VISION | {"hidden_size": 32, "intermediate_size": 186}
_AUDIO = {key: value for key, value in _TEXT.items() if not key.endswith(("vocab_size", "token_id"))}
_GLM = _TEXT | _EXPERTS | _LATENT | {"head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2}
_MISTRAL = (
    _TEXT
    | _EXPERTS
    | _LATENT
    | {"qk_rope_head_dim": 8, "head_dim": 8, "no_rope_layers": [1, 0], "kv_source_layers": [0, 1]}
    | {"indexer_types": ["full", "full"], "layer_types": ["indexed_attention"] * 2}
)
_HUNYUAN = (
    _TEXT
    | _EXPERTS
    | _LATENT
    | {
        "qk_rope_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    | {"layer_types": ["indexed_attention"] * 2, "indexer_types": ["full", "shared"], "hc_mult": 2}
)
_ENCODER = {"hidden_size": 16, "num_filters": 4, "downsampling_ratios": (2, 2), "depths": (1, 1, 1)}
_NEMOTRON = (
    _TEXT
    | _EXPERTS
    | {
        "layers_block_type": ["linear_attention", "moe"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
    }
    | {"n_groups": 1, "moe_shared_expert_intermediate_size": 8}
)
_QWEN4 = (
    _TEXT
    | _EXPERTS
    | {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 8, "hc_count": 2}
    | {"hc_lowrank": 4, "ple_embed_dim": 32, "ngram_vocab_size_base": 97, "split_ngram_parts": 2, "indexer_n_heads": 4}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 2}
    | {"layer_types": ["linear_attention", "full_attention"]}
)
_OMNI_AUDIO = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "d_model": 32}
_OMNI_TEXT = _TEXT | {key: value for key, value in _EXPERTS.items() if key != "mlp_layer_types"}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "aria": {
        "vision_config": _VISION | {"model_type": "idefics3_vision"},
        "text_config": _TEXT | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        "projector_patch_to_query_dict": {4: 4},
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {
                **_VISION,
                "image_size": 64,
                "patch_size": 16,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": (1,),
                "mlp_dim": 24,
                "downsample_channels": [16, 32],
            },
            "encoder_config": _TEXT,
        },
        "text_config": _TEXT | _EXPERTS,
    },
    "dory": _TEXT
    | {"num_hidden_layers": 3, "layer_types": None}
    | {f"n_{part}_layers": 1 for part in ("input", "recurrent", "output")},
    "dots1": _TEXT | _EXPERTS | {"first_k_dense_replace": 1},
    "dots3_note_audio_encoder": _AUDIO
    | {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8, "conv_output_size": 128},
    "dots3_note_vision_encoder": _VISION
    | {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "sparse"]}
    | {"moe_intermediate_size": 8, "num_local_experts": 4},
    "ernie4_5_vl_moe": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            # Positions have sections of heads of 128 numbers.
            "hidden_size": 512,
            "head_dim": 128,
            "moe_intermediate_size": [8, 8],
            "moe_num_experts": 4,
            "moe_k": 2,
        },
        "vision_config": _VISION,
    },
    "gemma3n_text": {
        **_TEXT,
        "num_hidden_layers": 4,
        "intermediate_size": [24] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
    },
    "gemma4_unified": {"text_config": _TEXT | {"layer_types": ["sliding_attention", "full_attention"]}},
    "glm5_next": {"text_config": _GLM, "vision_config": _VISION | {"projection_intermediate_size": 24}},
    "glm5_next_text": _GLM,
    "hy_v4_vl": {"text_config": _HUNYUAN, "vision_config": _VISION},
    "hy_v4_vl_text": _HUNYUAN,
    "inkling_mm_model": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "rel_extent": 16,
        },
        "audio_config": {"text_hidden_size": 32},
        "vision_config": _VISION | {"text_hidden_size": 32, "n_layers": 2, "patch_size": 40},
    },
    "laguna": {
        **_TEXT,
        **_EXPERTS,
        "num_attention_heads_per_layer": [4, 4],
        "layer_types": ["full_attention", "sliding_attention"],
        "shared_expert_intermediate_size": 8,
    },
    "lfm2_moe": _TEXT | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "maskformer": {
        "backbone_config": {
            "model_type": "swin",
            "image_size": 64,
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
            "window_size": 2,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "decoder_config": {
            "model_type": "detr",
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "d_model": 32,
        },
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "minimax_m3_vl": {
        "vision_config": _VISION,
        "text_config": _TEXT
        | _EXPERTS
        | {"dense_intermediate_size": 24, "shared_intermediate_size": 24, "rotary_dim": 4, "index_head_dim": 8},
        "projector_hidden_size": 32,
        "merged_hidden_size": 128,
    },
    "mistral_large4": {
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
        "text_config": _MISTRAL | {"model_type": "mistral_large4_text"},
    },
    "mistral_large4_text": _MISTRAL,
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": _AUDIO,
            "diarization_config": {
                "audio_config": _AUDIO,
                "head_config": {"hidden_size": 16, "audio_hidden_size": 32},
            },
        },
        "text_config": _NEMOTRON,
        "word_timestamp_config": _AUDIO | {"vocab_size": 99, "blank_token_id": 98},
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "audio_config": _OMNI_AUDIO | {"output_dim": 32, "downsample_hidden_size": 8},
            "vision_config": _VISION | {"deepstack_visual_indexes": (1,), "num_position_embeddings": 4},
            "text_config": _OMNI_TEXT,
        },
        "talker_config": {
            "code_predictor_config": _TEXT | {"num_code_groups": 4},
            "text_config": _OMNI_TEXT | {"shared_expert_intermediate_size": 8},
            "num_code_groups": 4,
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
        },
        "code2wav_config": _AUDIO | {"codebook_size": 16, "decoder_dim": 64, "num_quantizers": 4},
    },
    "qwen4_exp_text": _QWEN4,
    "step3p5_vision": _STEP_VISION,
    "step3p7": {
        "vision_config": _STEP_VISION,
        "text_config": _TEXT | _EXPERTS | {"share_expert_dim": 8, "num_sliding_attention_heads": 4},
    },
    "t5gemma2_encoder": {
        "text_config": _TEXT | {"dropout_rate": 0.0, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _VISION,
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _ENCODER,
        "semantic_tokenizer_encoder_config": _ENCODER,
        "text_config": _TEXT | {"model_type": "qwen2"},
    },
}
