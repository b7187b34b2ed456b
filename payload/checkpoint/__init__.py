"""Checkpoints: sharded over ranks, written beside the training, complete or not there.

    FOLDER/.lock                                rank 0 of the run that uses it has that locked
    FOLDER/iteration-00000300.TOKEN.incomplete/ while ranks still write; another token a run
    FOLDER/iteration-00000300/
        rank-00000.safetensors                rank 0's share of weights, optimizer and layers' state
        rank-00001.safetensors
        manifest.json                         written last: what this is, and each file's size and CRC-32

``shards`` says what each rank saves, and how that looks on disk. ``saver`` and its thread ``writer`` write;
``session`` loads, on the same layout of ranks or any other.
"""
