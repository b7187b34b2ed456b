"""Checkpoints: sharded over ranks, written beside the training, complete or not there.

    FOLDER/iteration-00000300.incomplete/     while ranks still write
    FOLDER/iteration-00000300/
        rank-00000.safetensors                rank 0's share of weights, optimizer and layers' state
        rank-00001.safetensors
        manifest.json                         written last: what this is, and each file's size and CRC-32

``pieces`` says what is in a rank's share, ``files`` how that looks on disk. ``saver`` and the process
``writer`` write, ``resume`` and ``reader`` load, on the same layout of ranks or any other.
"""
