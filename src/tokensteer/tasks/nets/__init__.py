"""The small networks that this project trains: denoisers, pairs of classifiers, values, and their files."""

from tokensteer.tasks.nets.classifiers import ConvClassifier as ConvClassifier
from tokensteer.tasks.nets.classifiers import ConvConfig as ConvConfig
from tokensteer.tasks.nets.classifiers import PatchClassifier as PatchClassifier
from tokensteer.tasks.nets.classifiers import PatchConfig as PatchConfig
from tokensteer.tasks.nets.dilated import Dilated as Dilated
from tokensteer.tasks.nets.dilated import DilatedConfig as DilatedConfig
from tokensteer.tasks.nets.dilated import MotifClassifier as MotifClassifier
from tokensteer.tasks.nets.dilated import MotifConfig as MotifConfig
from tokensteer.tasks.nets.dilated import WordsClassifier as WordsClassifier
from tokensteer.tasks.nets.dilated import WordsConfig as WordsConfig
from tokensteer.tasks.nets.readers import AttentiveConfig as AttentiveConfig
from tokensteer.tasks.nets.readers import AttentiveReader as AttentiveReader
from tokensteer.tasks.nets.readers import NgramConfig as NgramConfig
from tokensteer.tasks.nets.readers import NgramReader as NgramReader
from tokensteer.tasks.nets.readers import Reader as Reader
from tokensteer.tasks.nets.store import load as load
from tokensteer.tasks.nets.store import save as save
from tokensteer.tasks.nets.transformer import Transformer as Transformer
from tokensteer.tasks.nets.transformer import TransformerConfig as TransformerConfig
from tokensteer.tasks.nets.transformer import Trunk as Trunk
from tokensteer.tasks.nets.unet import UNet as UNet
from tokensteer.tasks.nets.unet import UNetConfig as UNetConfig
from tokensteer.tasks.nets.value import ValueConfig as ValueConfig
from tokensteer.tasks.nets.value import ValueNet as ValueNet
