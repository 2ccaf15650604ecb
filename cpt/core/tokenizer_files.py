"""The files of a tokenizer in the folder of a checkpoint or of an exported model."""

# Files of tokenizers by their patterns in a folder, in addition to those that the tokenizer's class names.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "normalizer.json",
    "chat_template*",
    "additional_chat_templates/*",
)
