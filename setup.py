"""What setup.cfg cannot say: PyPI shows the README, without the links and pictures that only a checkout has."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text()
text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
setup(long_description=text, long_description_content_type="text/markdown")
