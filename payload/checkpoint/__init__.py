"""Checkpoints: sharded over ranks, written in the background, and either complete or absent.

    FOLDER/.lock                                locked by rank 0 of the run that uses the folder
    FOLDER/iteration-00000300.TOKEN.incomplete/ while ranks are writing; each run has its own TOKEN
    FOLDER/iteration-00000300/
        rank-00000.safetensors                rank 0's share of weights, optimizer and layers' state
        rank-00001.safetensors
        manifest.json                         written last: settings, and each file's size and CRC-32

``shards`` defines the shards that each rank saves, and their files. ``saver`` and its thread
``writer`` write the files. ``session`` loads the files, also if the number or the arrangement of
ranks has changed.
"""
