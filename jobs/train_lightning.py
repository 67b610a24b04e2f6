"""Train a convolutional network of PyTorch on handwritten digits with Lightning's Trainer.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_lightning.py --data data/digits.h5 --output runs/lightning

The trainer uses the process group that is there. The same command resumes from the newest
checkpoint, within an epoch and on a different number of ranks too.
"""

import os

import digits_torch
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import mpistrat.lightning as ml
import mpistrat.torch as mst

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import MPIEnvironment
except ImportError:
    raise SystemExit("train_lightning.py needs Lightning: pip install lightning") from None


class Digits(pl.LightningModule):
    """The network, with what the trainer needs to know."""

    def __init__(self, args):
        super().__init__()
        self.network = digits_torch.make_network(args.seed)
        self.num_epochs = args.epochs

    def forward(self, image):
        """Return the logits of images."""
        return self.network(image)

    def training_step(self, batch, batch_idx):
        """Return the loss of this rank's part of a global batch."""
        image, label = batch
        loss = digits_torch.weighted_loss(self, image, label)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self):
        """Return the optimizer, and its schedule."""
        optimizer = digits_torch.make_optimizer(self)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.num_epochs)
        return [optimizer], [schedule]


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    mst.init()  # before Lightning looks for the other ranks
    torch.set_num_threads(1)
    # DistributedDataParallel needs examples on every rank.
    train = digits_torch.make_batches(args, "train", drop_remainder=True)
    saved = ml.HDF5Checkpoint(args.output, data=train)
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=local_size,
        num_nodes=dist.get_world_size() // local_size,
        strategy="ddp",
        plugins=MPIEnvironment(),
        max_epochs=args.epochs,
        callbacks=[saved],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(args)
    trainer.fit(model, DataLoader(train, batch_size=None))
    mst.assert_replicas_agree(model)
    accuracy = digits_torch.accuracy_of(model, digits_torch.make_batches(args, "test"))
    if dist.get_rank() == 0:
        if saved.restored_path:
            print(f"resumed from {saved.restored_path} on {dist.get_world_size()} rank(s)")
        if "loss" in trainer.callback_metrics:
            print(f"loss: {trainer.callback_metrics['loss']:.4f}")
        print(f"test accuracy: {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
