"""The text decoder of a model of images and text, as a causal model that cpt trains; and its way back.

python docs/examples/text_decoder.py MODEL DECODER
python docs/examples/text_decoder.py MODEL DECODER TRAINED_MODEL

MODEL is a folder or a name on the Hub, as of LLaVA. With two arguments its decoder and its tokenizer are
saved in the folder DECODER. With three, DECODER is the folder of a trained one, and TRAINED_MODEL gets MODEL
with its weights: the parts for images are those of MODEL."""

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)


def make_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder of a model, with whose head and body it shares memory."""
    config = model.config.get_text_config()
    config.tie_word_embeddings = model.config.tie_word_embeddings
    with torch.device("meta"):  # its own weights are not needed
        decoder = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    setattr(decoder, decoder.base_model_prefix, model.get_decoder())
    decoder.set_output_embeddings(model.get_output_embeddings())
    return decoder


name, decoder_folder = sys.argv[1:3]
model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto")
decoder = make_decoder(model)
if len(sys.argv) == 3:
    decoder.save_pretrained(decoder_folder)
    AutoTokenizer.from_pretrained(name).save_pretrained(decoder_folder)
else:
    trained_folder = sys.argv[3]
    trained = AutoModelForCausalLM.from_pretrained(decoder_folder, dtype=model.dtype)
    decoder.load_state_dict(trained.state_dict())
    model.save_pretrained(trained_folder)
    AutoProcessor.from_pretrained(name).save_pretrained(trained_folder)
