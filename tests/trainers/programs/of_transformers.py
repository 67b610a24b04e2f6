"""A tiny model of Hugging Face without a download, and a trainer that may be interrupted."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import shared
import torch
import torch.distributed as dist
from shared import BATCH, EPOCHS, ROWS, rank_and_size

import mpistrat.torch as mst

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
elif os.environ.get("ON_MPI"):
    mst.init()  # before TrainingArguments looks for other processes

import transformers

import mpistrat.transformers as mt

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def rows():
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 20, (ROWS, 6))
    return [{"input_ids": each.tolist(), "labels": int(each.sum() % 2)} for each in tokens]


def model(width=8, dropout=0.1):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


class At(shared.At, transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        self.reached(state.global_step)


class Training:
    """One call of `train`, as at the start of a job."""

    def __init__(self, folder, *others, net=None, options=(), **arguments):
        _, size = rank_and_size()
        callbacks = [*others]
        # By default the trainer learns from the whole batch of all ranks.
        self.model = model() if net is None else net
        if folder is not None:
            self.saved = mt.HDF5Checkpoint(folder, **dict(options))
            callbacks.append(self.saved)
        usual = {
            "per_device_train_batch_size": BATCH // size,
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-2,
            "logging_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 5,
            "metric_for_best_model": "loss",
        }
        arguments = transformers.TrainingArguments(
            "unused",
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **{**usual, **arguments},
        )
        self.stopping = transformers.EarlyStoppingCallback(early_stopping_patience=50)
        callbacks.insert(0, self.stopping)
        self.trainer = transformers.Trainer(
            self.model,
            arguments,
            train_dataset=rows(),
            eval_dataset=rows()[:12],
            callbacks=callbacks,
        )
        self.trainer.remove_callback(transformers.PrinterCallback)

    def run(self):
        """Train, and return the values that must not depend on interruptions."""
        self.trainer.train()
        state = self.trainer.state
        return {
            "weights": torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy(),
            "step": state.global_step,
            "epoch": state.epoch,
            "rate": self.trainer.optimizer.param_groups[0]["lr"],
            "evaluated": [each["eval_loss"] for each in state.log_history if "eval_loss" in each],
            "flos": state.total_flos,
            "patience": self.stopping.early_stopping_patience_counter,
        }
