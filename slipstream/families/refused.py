"""Architectures of transformers that are not trained, by model_type, and why (docs/reference/families.md)."""

_MODELS_BY_REASON = {
    "its keys and values are made from a latent vector (MLA), which SGLang holds absorbed in matrices of its own": (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm_moe_dsa"),
        *("longcat_flash", "youtu"),
    ),
    "its layers carry a state from token to token, which would run from one packed trajectory into the next": (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2"),
        *("minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    ),
    "its router, its shared experts or the biases of its experts are others than the learner computes": (
        *("afmoe", "aria_text", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss"),
        *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jetmoe", "laguna", "llama4", "llama4_text", "minimax_m2"),
        *("minimax_m3_vl_text", "phimoe", "qwen2_moe", "solar_open"),
    ),
    "its layers share keys and values with others, or read embeddings of their own": (
        *("gemma3n_text", "gemma4_assistant", "gemma4_text", "gemma4_unified_assistant", "gemma4_unified_text"),
    ),
    "its positions are learned, or added to scores, and a packed row counts them for rotary tables alone": (
        *("biogpt", "bloom", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "openai-gpt", "opt", "xglm"),
    ),
    "it was made to read in both directions, or to answer an encoder": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus"),
        *("plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
        *("whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "it takes or makes sound or pictures by parts that the bus does not carry": (
        *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "mllama", "moshi"),
        *("musicgen", "musicgen_melody", "phi4_multimodal"),
    ),
    "no engine serves it: SGLang has no class for it": (
        *("bitnet", "blt", "codegen", "cpmant", "cwm", "diffllama", "doge", "ernie4_5", "falcon", "flex_olmo", "glm"),
        *("gpt_neox", "gpt_neox_japanese", "helium", "hyperclovax", "jais2", "ministral", "modernbert-decoder"),
        *("nanochat", "olmo3", "reformer", "seed_oss", "smollm3", "vaultgemma"),
    ),
    "it has no record here; one of your own may describe it (model.family)": (
        *("apertus", "arcee", "cohere", "cohere2", "dbrx", "exaone4", "gemma", "gptj", "granitemoe", "hrm_text"),
        *("hunyuan_v1_dense", "mellum", "ministral3", "mixtral", "nemotron", "olmo", "persimmon", "phi", "stablelm"),
        *("starcoder2",),
    ),
}
REFUSED = {kind: reason for reason, kinds in _MODELS_BY_REASON.items() for kind in kinds}
