"""SGLang model classes of rayspec's drafters; SGLang finds them through SGLANG_EXTERNAL_MODEL_PACKAGE."""
