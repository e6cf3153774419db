"""``python -m keras_gradwatch``: the same as the command ``keras-gradwatch``."""

import sys

from keras_gradwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
