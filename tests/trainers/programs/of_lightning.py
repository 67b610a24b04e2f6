"""A small module of Lightning with data, and a trainer that may be interrupted."""

import os
import warnings

import lightning.pytorch as pl
import numpy as np
import shared
import torch
import torch.distributed as dist
from shared import BATCH, EPOCHS, ROWS, rank_and_size
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
import mpistrat.lightning as ml
import mpistrat.torch as mst

warnings.filterwarnings("ignore", module="lightning")
torch.set_num_threads(1)

if "TORCHELASTIC_RUN_ID" in os.environ:
    dist.init_process_group("gloo")
elif os.environ.get("ON_MPI"):
    mst.init()


def rows():
    return np.random.default_rng(7).random((ROWS, 4), dtype=np.float32)


class Network(pl.LightningModule):
    """A network that logs, with schedulers that depend on the steps and on the validation."""

    def __init__(self, dropout=0.0, sharded=False, width=8):
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, width), torch.nn.Dropout(dropout), torch.nn.Linear(width, 1)
        self.net = torch.nn.Sequential(*layers)
        self.sharded = sharded

    def configure_model(self):
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        (x,) = batch if isinstance(batch, list) else (batch,)
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("test", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "test", "interval": "epoch"}]


class At(shared.At, pl.Callback):
    def on_train_batch_end(self, trainer, *others):
        self.reached(trainer.global_step)


class Training:
    """One call of `fit`, as at the start of a job."""

    def __init__(self, folder, *others, kind="loader", model=None, options=(), **trainer):
        _, size = rank_and_size()
        self.model = Network(dropout=0.3 if kind == "loader" else 0) if model is None else model
        data = ()
        if kind == "hdf5":
            data = mst.HDF5Dataset(ms.data.Dataset.from_arrays(rows()).shuffle(3).batch(BATCH))
            self.loader = DataLoader(data, batch_size=None)
        else:
            examples = TensorDataset(torch.from_numpy(rows()))
            self.loader = DataLoader(examples, BATCH // size, shuffle=True)
        self.stopping = pl.callbacks.EarlyStopping("test", patience=50)
        callbacks = [*others, self.stopping]
        if folder is not None:
            self.saved = ml.HDF5Checkpoint(folder, **{"data": data, **dict(options)})
            callbacks.append(self.saved)
        strategy = "ddp" if size > 1 else "auto"
        usual = {"strategy": strategy, "devices": size, "max_epochs": EPOCHS}
        self.trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{**usual, **trainer},
        )

    def run(self):
        """Train, and return the values that must not depend on interruptions."""
        torch.manual_seed(11 + rank_and_size()[0])
        test = TensorDataset(torch.from_numpy(rows()[:12]))
        self.trainer.fit(self.model, self.loader, DataLoader(test, 4))
        trainer = self.trainer
        return {
            "weights": weights_of(self.model),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "best": float(self.stopping.best_score),
            "wait": self.stopping.wait_count,
        }


def weights_of(model):
    tensors = [each.detach() for each in model.parameters()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return torch.cat([each.flatten() for each in whole]).numpy()
