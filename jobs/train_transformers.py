"""Train a small vision transformer of Hugging Face on handwritten digits.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_transformers.py --data data/digits.h5 --output runs/vit

The model is made from its configuration, so nothing is downloaded. The trainer uses the process
group that is there, and divides the examples among the ranks itself. The same command resumes from
the newest checkpoint, within an epoch and on a different number of ranks too.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import digits_torch
import h5py
import torch
import torch.distributed as dist

import mpistrat.torch as mst
import mpistrat.transformers as mt

try:
    import transformers
except ImportError:
    message = "train_transformers.py needs transformers: pip install transformers accelerate"
    raise SystemExit(message) from None


def make_model(seed):
    """Return a vision transformer for images of 8 x 8 pixels, in 16 patches."""
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def read(path, part):
    """Return the examples of one part of the file, as the trainer takes them. Local."""
    with h5py.File(path) as file:
        images, labels = file[f"{part}/image"][:], file[f"{part}/label"][:]
    pixels = torch.from_numpy(images)[:, None].float() / 16
    return [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(pixels, labels, strict=True)
    ]


def accuracy_of(prediction):
    """Return the accuracy of all predictions of the trainer."""
    right = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    group = mst.init()  # before TrainingArguments looks for the other ranks
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if args.batch_size % group.size():
        raise SystemExit(f"--batch-size must be a multiple of the {group.size()} ranks")
    saved = mt.HDF5Checkpoint(args.output)
    arguments = transformers.TrainingArguments(
        os.path.join(args.output, "trainer"),
        use_cpu=True,
        per_device_train_batch_size=args.batch_size // group.size(),
        num_train_epochs=args.epochs,
        learning_rate=3e-3,
        dataloader_drop_last=True,  # so that an epoch is as long on any number of ranks
        average_tokens_across_devices=False,  # the loss is a mean over images
        ddp_find_unused_parameters=False,
        seed=args.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        make_model(args.seed),
        arguments,
        train_dataset=read(args.data, "train"),
        eval_dataset=read(args.data, "test"),
        compute_metrics=accuracy_of,
        callbacks=[saved],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    mst.assert_replicas_agree(trainer.model)
    accuracy = trainer.evaluate()["eval_accuracy"]
    if group.rank() == 0:
        if saved.restored_path:
            print(f"resumed from {saved.restored_path} on {group.size()} rank(s)")
        print(f"test accuracy: {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
