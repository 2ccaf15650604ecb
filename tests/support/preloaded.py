"""Read in by the process that scripts of the tests are forked from: what every run reads in, and what a
parser learns of its first words. Nothing is drawn, computed by torch or told to Hydra."""

import gc

gc.disable()  # nothing of what follows is ever freed

import lightning.pytorch  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402, F401
import PIL.PngImagePlugin  # noqa: E402
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks  # noqa: E402, F401
import transformers.generation.utils  # noqa: E402, F401
from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: E402
from transformers.models.gpt2 import modeling_gpt2  # noqa: E402, F401
from transformers.models.modernbert import modeling_modernbert  # noqa: E402, F401
from transformers.models.t5 import modeling_t5  # noqa: E402, F401

import cpt.cli  # noqa: E402, F401
import cpt.contrib.generative_replay.writer  # noqa: E402, F401
import cpt.data.sources.tasks  # noqa: E402, F401
import cpt.data.sources.texts  # noqa: E402, F401
import cpt.train  # noqa: E402, F401
import cpt.trainer.loop  # noqa: E402, F401
from cpt.core.config import CONF  # noqa: E402
from tests.support.fast_libraries import cache_yaml, pickle_yaml  # noqa: E402

PIL.Image.preinit()
OverridesParser.create().parse_overrides(["a=b", "c.d=[e,1]", "+f={g: 1e-3}", "h='i j'", "k@l.m=n", "o=null"])
cache_yaml()
for path in (CONF / "config.yaml", *CONF.glob("*/*.yaml")):
    pickle_yaml(path.read_text(encoding="utf-8"))
gc.freeze()  # a fork that looks for cycles leaves these objects, and their pages, alone
gc.enable()
