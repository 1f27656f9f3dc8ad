"""JPEGs decoded by the fastest decoder that is installed: simplejpeg, OpenCV, or Pillow, which Paddle brings along.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/jpeg.py

Each worker decodes files of a list that all workers share. Decoding takes most of the time of an image pipeline, so the
number of workers and the decoder decide how fast it is: `print(loader.stats)` says what a step waits for.
"""

import io
import tempfile
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from PIL import Image

import paddle_shard

NUM_IMAGES, SIZE, BATCH_SIZE = 64, (96, 128), 16


def decoder():
    """The name of the fastest decoder that is here, and a function from bytes to an RGB array."""
    try:
        import simplejpeg

        return "simplejpeg", simplejpeg.decode_jpeg
    except ImportError:
        pass
    try:
        import cv2

        def decode(data):
            image = cv2.imdecode(np.frombuffer(data, "uint8"), cv2.IMREAD_COLOR)
            return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

        return "OpenCV", decode
    except ImportError:
        return "Pillow", lambda data: np.asarray(Image.open(io.BytesIO(data)))


class Images(paddle.io.Dataset):
    """Files of JPEG images; the label of each is its brightness, from 0 to 7."""

    def __init__(self, paths):
        self.paths = paddle_shard.SharedList(map(str, paths))
        self.decode = decoder()[1]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = Path(self.paths[index])
        image = self.decode(path.read_bytes())
        return image.transpose(2, 0, 1), np.int64(path.stem.partition("-")[0])


def write_images(folder):
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        label = number % 8
        noise = random.integers(0, 16, (*SIZE, 3))
        pixels = (32 * label + noise).astype("uint8")
        Image.fromarray(pixels).save(
            folder / f"{label}-{number:02}.jpg", quality=95
        )


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    if dist.get_rank() == 0:
        write_images(folder)
    dist.barrier()

    data = Images(sorted(folder.glob("*.jpg")))
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(
            data, batch_size=BATCH_SIZE, shuffle=True, num_workers=2
        ),
        mesh,
        shard_dims="dp",
    )
    num_right = 0
    for images, labels in loader:
        brightness = images.astype("float32").mean([1, 2, 3]) // 32
        num_right += int((brightness.astype("int64") == labels).sum())
    assert num_right == NUM_IMAGES
    if dist.get_rank() == 0:
        print(
            f"{decoder()[0]}: {num_right} of {NUM_IMAGES} images as they were written"
        )
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    dist.barrier()


if __name__ == "__main__":
    main()
