"""Time to decode a JPEG image of 500 x 375 pixels on one core, by each decoder that is installed.

    python benchmarks/jpeg.py

The image is smoothed noise, saved by Pillow with quality 90 (80 KB), and decoded to an RGB array. All decoders run in
turns; the best of several rounds counts, since a decoder computes and does not wait.
"""

import io
import time

import numpy as np
from common import machine, print_table
from PIL import Image

SIZE, ROUNDS, NUM_IMAGES = (500, 375), 9, 40


def make_image():
    rng = np.random.default_rng(0)
    small = rng.integers(
        0, 256, (SIZE[1] // 5, SIZE[0] // 5, 3), dtype=np.uint8
    )
    image = Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def decoders():
    """Return {name: a function from bytes to an RGB array}."""
    found = {"Pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)))}
    try:
        import cv2

        cv2.setNumThreads(1)

        def decode_by_opencv(data):
            image = cv2.imdecode(np.frombuffer(data, "uint8"), cv2.IMREAD_COLOR)
            return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

        found["OpenCV"] = decode_by_opencv
    except ImportError:
        pass
    try:
        import simplejpeg

        found["simplejpeg"] = simplejpeg.decode_jpeg
        found["simplejpeg, fast"] = lambda data: simplejpeg.decode_jpeg(
            data, fastdct=True, fastupsample=True
        )
    except ImportError:
        pass
    try:
        import torch
        from torchvision.io import decode_jpeg

        torch.set_num_threads(1)

        def decode_by_torchvision(data):
            tensor = decode_jpeg(
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
            )
            return tensor.permute(1, 2, 0).numpy()

        found["torchvision"] = decode_by_torchvision
    except ImportError:
        pass
    return found


def main():
    data = make_image()
    print(f"{machine()}; {len(data):,} bytes\n")
    best = {}
    functions = decoders()
    for _ in range(ROUNDS):
        for name, decode in functions.items():
            start = time.perf_counter()
            for _ in range(NUM_IMAGES):
                image = decode(data)
            seconds = (time.perf_counter() - start) / NUM_IMAGES
            assert image.shape == (SIZE[1], SIZE[0], 3)
            best[name] = min(best.get(name, seconds), seconds)
    rows = [
        [name, f"{1e3 * seconds:.2f}", f"{1 / seconds:,.0f}"]
        for name, seconds in sorted(best.items(), key=lambda pair: pair[1])
    ]
    print_table(
        "A JPEG image on one core", ["decoder", "ms", "images a second"], rows
    )


if __name__ == "__main__":
    main()
