"""Rewards of the images that tokens decode to: published scores, colours, sizes of files, and any function of
pixels or of PIL images."""

from tokensteer.rewards.image.aesthetic import Aesthetic as Aesthetic
from tokensteer.rewards.image.aesthetic import aesthetic as aesthetic
from tokensteer.rewards.image.clip import ClipScore as ClipScore
from tokensteer.rewards.image.clip import clip_score as clip_score
from tokensteer.rewards.image.clip import hpsv2 as hpsv2
from tokensteer.rewards.image.convert import blip_layout as blip_layout
from tokensteer.rewards.image.convert import clip_layout as clip_layout
from tokensteer.rewards.image.decoded import OfImages as OfImages
from tokensteer.rewards.image.decoded import OfPil as OfPil
from tokensteer.rewards.image.decoded import of_images as of_images
from tokensteer.rewards.image.decoded import of_pil as of_pil
from tokensteer.rewards.image.image_reward import ImageReward as ImageReward
from tokensteer.rewards.image.image_reward import image_reward as image_reward
from tokensteer.rewards.image.pixels import Preparation as Preparation
from tokensteer.rewards.image.plain import HUES as HUES
from tokensteer.rewards.image.plain import compressibility as compressibility
from tokensteer.rewards.image.plain import mostly as mostly
from tokensteer.rewards.image.plain import share_of as share_of
