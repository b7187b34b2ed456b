"""JAX on several nodes: one mesh of all devices, with the batch sharded over it and the parameters on each.

clusterctl submit examples/jax_dp.py --requirements examples/requirements-jax.txt --nodes 2
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_cpu_collectives_implementation", "gloo")
if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
    jax.distributed.initialize()  # the coordinator and the number of processes come from Slurm's variables

Params = dict[str, jax.Array]


def predict(params: Params, place: jax.Array) -> jax.Array:
    hidden = jnp.tanh(place @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"])[:, 0]


def cross_entropy(params: Params, place: jax.Array, label: jax.Array) -> jax.Array:
    logit = predict(params, place)
    return jnp.mean(jax.nn.softplus(logit) - label * logit)


@jax.jit
def step(params: Params, place: jax.Array, label: jax.Array) -> tuple[Params, jax.Array]:
    """One step of gradient descent. XLA adds the sum over all processes."""
    loss, gradient = jax.value_and_grad(cross_entropy)(params, place, label)
    return jax.tree.map(lambda value, slope: value - 0.5 * slope, params, gradient), loss


def main() -> None:
    rank, world = jax.process_index(), jax.process_count()
    print(
        f"rank {rank} of {world}: {jax.local_devices()[0].platform}, {jax.device_count()} devices", flush=True
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    first = np.random.default_rng(0)
    shapes = {"w1": (2, 32), "b1": (32,), "w2": (32, 1), "b2": (1,)}
    values = {name: first.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params = jax.device_put(values, everywhere)

    own = np.random.default_rng(1 + rank)  # each process makes its own part of the data
    place = own.uniform(-1, 1, (4096 // world, 2)).astype(np.float32)
    label = ((place**2).sum(axis=1) < 0.6).astype(np.float32)  # inside a circle?
    batch, target = (jax.make_array_from_process_local_data(sharded, part) for part in (place, label))
    for iteration in range(501):
        params, loss = step(params, batch, target)
        if rank == 0 and iteration % 100 == 0:
            print(f"iteration {iteration}: loss {loss:.4f}", flush=True)
    accuracy = jnp.mean((predict(params, batch) > 0) == (target > 0.5))
    if rank == 0:
        print(f"accuracy {accuracy:.3f} by {world} ranks")


if __name__ == "__main__":
    main()
