"""Constraining modules, what every torch operation keeps, groups for optimizers, and reports."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from cases import in_turn
from contract import through_file, warnings_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import stiefel_opt as so
from stiefel_opt.numerics.geometry import orthonormality_tolerance, polar_factor, random_point
from stiefel_opt.tags import constraints, watch
from stiefel_opt.tags.manifold import manifold_of

Stiefel = so.Stiefel


class Attention(nn.Module):
    """Two constrained projections, one of them tied to a third, and a plain layer."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.k_again = nn.Linear(8, 4, bias=False)
        self.k_again.weight = self.k.weight
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.q(x)) + (self.k(x) * self.k_again(x)).sum()


READINGS = {"q.weight": Stiefel(heads=2), "k.weight": Stiefel(scale=0.5)}


def attention():
    model = Attention()
    so.constrain(model.q, "weight", heads=2)
    so.constrain(model.k, scale=0.5)
    return model


def holder(value, requires_grad=True):
    module = nn.Module()
    module.weight = nn.Parameter(value, requires_grad)
    return module


def readings(model):
    """Every tag in the model, by name."""
    tags = {name: manifold_of(parameter) for name, parameter in model.named_parameters()}
    return {name: tag for name, tag in tags.items() if tag is not None}


# ---- values ------------------------------------------------------------------------------------


def test_constrain_returns_the_module_and_keeps_the_parameter_object():
    layer = nn.Linear(8, 4)
    weight, storage, version = layer.weight, layer.weight.data_ptr(), layer.weight._version
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert so.constrain(layer) is layer
    assert layer.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.data_ptr() == storage
    assert weight._version > version
    assert isinstance(weight, so.ManifoldParameter)
    assert weight.requires_grad
    assert weight.is_leaf


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    in_turn(
        [(8, 4), (4, 8), (5, 5), (3, 6, 2)],
        [torch.float32, torch.float64],
        [1.0, 3.0, 3.0, 1.0],
    ),
)
def test_constrain_projects_to_the_nearest_point(shape, dtype, scale, generator):
    start = torch.randn(shape, generator=generator, dtype=dtype)
    module = so.constrain(holder(start.clone()), scale=scale, flatten=False)
    nearest = polar_factor(start) if shape[-2] >= shape[-1] else polar_factor(start.mT).mT
    torch.testing.assert_close(module.weight.data, scale * nearest)
    tolerance = orthonormality_tolerance(dtype, max(shape[-2:]))
    assert so.orthonormality_error(module) < tolerance


@pytest.mark.parametrize(
    ("n", "dtype", "scale"), in_turn([3, 32, 384], [torch.float32, torch.float64], [1.0, 0.1])
)
def test_a_value_already_there_stays_bit_for_bit(n, dtype, scale, generator):
    start = scale * random_point(5, n, 3, generator=generator, dtype=dtype)
    module = holder(start.clone())
    version = module.weight._version
    so.constrain(module, scale=scale, flatten=False)
    assert torch.equal(module.weight, start)
    assert module.weight._version == version
    with torch.no_grad():
        module.weight[2] += 0.1 * scale
    so.constrain(module, scale=scale, flatten=False)
    others = [0, 1, 3, 4]
    assert torch.equal(module.weight[others], start[others])
    assert not torch.equal(module.weight[2], start[2])
    assert so.orthonormality_error(module.weight) < orthonormality_tolerance(dtype, n)


def test_heads_rows_and_transposed_project_their_own_blocks_only():
    fused = nn.Linear(6, 14)
    start = fused.weight.detach().clone()
    so.constrain(fused, rows=((0, 6), (8, 12)), heads=(2, 1))
    weight = fused.weight.detach()
    assert torch.equal(weight[6:8], start[6:8])
    assert torch.equal(weight[12:], start[12:])
    for low, high in [(0, 3), (3, 6), (8, 12)]:
        torch.testing.assert_close(weight[low:high], polar_factor(start[low:high].mT).mT)
    options = {"rows": ((0, 6), (8, 12)), "heads": (2, 1), "transposed": True}
    stored = so.constrain(holder(start.mT.clone()), **options)
    torch.testing.assert_close(stored.weight.detach(), weight.mT)


@pytest.mark.parametrize(
    ("module", "rows", "columns"),
    [
        (nn.Conv1d(4, 6, 3), 6, 12),
        (nn.Conv2d(4, 6, 3), 6, 36),
        (nn.Conv3d(2, 6, (1, 2, 3)), 6, 12),
        (nn.Conv2d(4, 6, 3, groups=2), 6, 18),
        (nn.ConvTranspose1d(4, 6, 2), 4, 12),
        (nn.ConvTranspose2d(4, 6, 2), 4, 24),
        (nn.ConvTranspose3d(2, 6, 2), 2, 48),
    ],
)
def test_convolutions_are_flattened(module, rows, columns):
    module = copy.deepcopy(module)
    if module.weight.ndim == 4 and module.groups == 1:
        module = module.to(memory_format=torch.channels_last)
    strides = module.weight.stride()
    so.constrain(module)
    assert module.weight.manifold == Stiefel(heads=module.groups, flatten=True)
    assert module.weight.stride() == strides
    height = rows // module.groups
    for matrix in module.weight.detach().reshape(-1, height, columns):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(height))
    so.constrain(module, flatten=False)
    assert module.weight.manifold == Stiefel()


def test_a_transposed_convolution_is_the_adjoint_of_the_convolution_read_alike():
    forward, backward = nn.Conv2d(4, 6, 3, bias=False), nn.ConvTranspose2d(6, 4, 3, bias=False)
    so.constrain(forward)
    with torch.no_grad():
        backward.weight.copy_(forward.weight)
    so.constrain(backward)
    assert torch.equal(backward.weight, forward.weight)
    x, y = torch.randn(1, 4, 5, 5), torch.randn(1, 6, 3, 3)
    torch.testing.assert_close((forward(x) * y).sum(), (x * backward(y)).sum())


def test_constraining_again_replaces_the_reading_and_watches_once():
    layer = so.constrain(so.constrain(nn.Linear(8, 8)), heads=4)
    assert layer.weight.manifold == Stiefel(heads=4)
    assert so.retag(layer).weight.manifold == Stiefel(heads=4)
    state = {"weight": 2 * torch.eye(8), "bias": torch.zeros(8)}
    assert len(warnings_of(lambda: layer.load_state_dict(state))) == 1


def test_on_the_meta_device_nothing_is_read():
    """Any read would raise."""
    with torch.device("meta"):
        model, value = attention(), torch.empty(3, 2)
    assert readings(model) == READINGS
    assert "meta" in str(so.report(model))
    assert so.orthonormality_error(model).is_meta
    for each in (value, nn.Parameter(value)):
        assert so.project_(each) is each
    with pytest.raises(ValueError, match="heads of x"):
        so.project_(value, so.Stiefel(heads=2))


# ---- bad input ---------------------------------------------------------------------------------


NAN = torch.tensor([[1.0, 0.0], [0.0, float("nan")], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (Attention(), {"name": "q.wieght"}, ValueError, "did you mean q.weight .*parameters are:"),
        (nn.Linear(2, 2), {"name": "zzz"}, ValueError, "of this Linear, got 'zzz'.*weight, bias"),
        (Attention(), {"name": "v.weight"}, ValueError, "its parameters are: q.weight, q.bias"),
        (Attention(), {"name": "q"}, ValueError, "must be a parameter of this Attention, got 'q'"),
        (nn.Linear(2, 2, bias=False), {"name": "bias"}, ValueError, "must be a parameter of"),
        (nn.ReLU(), {}, ValueError, "it has no parameters"),
        (nn.BatchNorm1d(2), {"name": "running_mean"}, ValueError, "must be a parameter of this"),
        (nn.Linear(2, 2), {"name": 3}, TypeError, "`name` must be the name of a parameter, got 3"),
        (torch.zeros(2, 2), {}, TypeError, "`module` must be a torch.nn.Module, got Tensor"),
        (nn.LazyLinear(2), {}, ValueError, "run one batch through the lazy module first"),
        (nn.Linear(2, 2), {"name": "bias"}, ValueError, "`bias` must have at least 2 dimensions"),
        (nn.Linear(2, 6), {"heads": 4}, ValueError, "`heads of weight` must divide its 6 rows"),
        (nn.Linear(2, 6), {"rows": (4, 8)}, ValueError, r"`rows of weight` must lie in \[0, 6\]"),
        (nn.Linear(2, 2), {"project": 1}, TypeError, "`project` must be True or False, got 1"),
        (holder(torch.zeros(0, 3)), {}, ValueError, r"`weight` must not be empty, got shape \(0"),
        (holder(NAN), {}, ValueError, "`weight` must be finite to be projected, got shape"),
        (holder(NAN[:, 1:] / 0), {}, ValueError, "`weight` must be finite to be projected"),
        (holder(torch.ones(3).expand(2, 3)), {}, ValueError, "`weight` must not repeat elements"),
        (
            holder(torch.ones(2, 2, dtype=torch.int32), False),
            {},
            TypeError,
            "`weight` must be one of float32, float64, .* to be constrained, got torch.int32",
        ),
    ],
)
def test_bad_input_gets_one_clear_error_and_changes_nothing(module, arguments, error, message):
    before = pickle.dumps(module)
    with pytest.raises(error, match=message):
        so.constrain(module, **arguments)
    assert pickle.dumps(module) == before


def test_parametrized_parameters_are_refused():
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="`weight` must be an unconstrained parameter, got one that _Wei"
    ):
        so.constrain(layer)
    assert readings(layer) == {}


def test_an_error_in_the_second_range_leaves_the_first_untouched():
    module = holder(torch.randn(6, 3))
    with torch.no_grad():
        module.weight[4] = float("inf")
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match="must be finite"):
        so.constrain(module, rows=((0, 3), (3, 6)))
    assert torch.equal(module.weight, before)
    assert manifold_of(module.weight) is None


# ---- what each operation keeps -----------------------------------------------------------------


whole_through_file = partial(through_file, weights_only=False)


def loaded(model, **options):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, **options)
    return model


def with_future(flag, operation):
    """Run ``operation`` under one of torch's announced ways to convert parameters."""

    def run(model):
        setter = getattr(torch.__future__, f"set_{flag}")
        setter(True)
        try:
            return operation(model)
        finally:
            setter(False)

    return run


def parametrized_elsewhere(model):
    parametrizations.weight_norm(model.out)
    parametrize.register_parametrization(model.q, "bias", nn.Identity())
    return model


def replaced(model):
    model.q.weight = nn.Parameter(model.q.weight.detach().clone())
    model.k.weight = model.k_again.weight = nn.Parameter(model.k.weight.detach().clone())
    return model


def reinitialised(module):
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)


def backpropagated(model):
    model(torch.randn(2, 8)).sum().backward()
    return model


KEEPS_BOTH = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save of the model": whole_through_file,
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "half": lambda model: model.half().float(),
    "to(device)": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "load_state_dict": loaded,
    "share_memory": lambda model: model.share_memory(),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "train and eval": lambda model: model.train().eval(),
    "apply": lambda model: model.apply(reinitialised),
    "backward": backpropagated,
    "parametrize and weight_norm of other parameters": parametrized_elsewhere,
    "vector_to_parameters": lambda model: (
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()), model.parameters()
        ),
        model,
    )[1],
    "remove_parametrizations": lambda model: (
        parametrized_elsewhere(model),
        parametrize.remove_parametrizations(model.out, "weight"),
        model,
    )[2],
}
KEEPS_THE_RECORD = {
    "to(meta)": lambda model: model.to("meta"),
    "to(meta).to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "load_state_dict(assign=True)": lambda model: loaded(model, assign=True),
    "a new parameter under the old name": replaced,
    "double, parameters overwritten": with_future(
        "overwrite_module_params_on_conversion", lambda model: model.double()
    ),
    "double, parameters swapped": with_future(
        "swap_module_params_on_conversion", lambda model: model.double()
    ),
}


def hooks(model):
    """The forward hooks of every kind in the model."""
    return [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]


def forwarded(model):
    model(torch.randn(2, 8, dtype=model.q.weight.dtype))
    return model


@pytest.mark.parametrize("operation", KEEPS_BOTH.values(), ids=KEEPS_BOTH)
def test_operations_that_keep_record_and_tag(operation):
    """And arm no hook that a forward pass leaves."""
    assert not hooks(forwarded(operation(forwarded(attention()))))
    model = operation(attention())
    assert readings(model) == READINGS
    assert model.k.weight is model.k_again.weight
    assert isinstance(model.q.weight, so.ManifoldParameter)
    model.to(torch.float32)(torch.randn(2, 8))  # no warning
    for parameter in list(model.parameters()):
        vars(parameter).pop("manifold", None)
    assert readings(so.retag(model)) == READINGS


@pytest.mark.parametrize("operation", KEEPS_THE_RECORD.values(), ids=KEEPS_THE_RECORD)
def test_operations_that_keep_the_record_only(operation):
    model = operation(attention())
    assert readings(model) == {}
    x = torch.randn(2, 8, device=model.q.weight.device, dtype=model.q.weight.dtype)
    with pytest.warns(so.LostTagWarning, match=r"so.retag\(model\)") as caught:
        model(x)
    told = [str(warning.message) for warning in caught]
    assert {warning.filename for warning in caught} == {__file__}
    assert len(told) == 2  # q and k
    assert all("`weight` of Linear has lost its Stiefel tag" in text for text in told)
    model(x)  # told once
    assert "tag lost: so.retag(model)" in str(so.report(model))
    assert so.retag(model) is model
    expected = dict(READINGS)
    if model.k.weight is not model.k_again.weight:  # torch itself unties here
        assert manifold_of(model.k_again.weight) is None
    assert readings(model) == expected
    assert "tag lost" not in str(so.report(model))
    replaced(model)
    with pytest.warns(so.LostTagWarning):
        model(x)


@pytest.mark.parametrize(
    ("operation", "before"),
    in_turn(KEEPS_THE_RECORD, [forwarded, copy.deepcopy, whole_through_file, so.retag]),
)
def test_replacing_is_seen_after_a_forward_pass_too(operation, before):
    model = KEEPS_THE_RECORD[operation](before(forwarded(attention())))
    x = torch.randn(2, 8, device=model.q.weight.device, dtype=model.q.weight.dtype)
    with pytest.warns(so.LostTagWarning):
        model(x)
    model(x)
    so.retag(model)(x)
    assert not hooks(model)


def test_torchscript_takes_a_constrained_model():
    """At once, and after a replaced parameter was tagged again."""
    model = attention().eval()
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for ready in (model, so.retag(replaced(model))):
            assert not hooks(ready)
            torch.testing.assert_close(torch.jit.script(ready)(x), model(x))


def test_the_fast_path_of_an_encoder_layer_is_taken(monkeypatch):
    calls = []
    fast = torch._transformer_encoder_layer_fwd

    def counted(*arguments):
        calls.append(1)
        return fast(*arguments)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    so.constrain(layer.self_attn, "in_proj_weight", rows=((0, 8), (8, 16)), heads=2)
    so.constrain(layer.self_attn, "out_proj.weight")
    with torch.inference_mode():
        layer(torch.randn(2, 3, 8))
        assert len(calls) == 1
        layer.self_attn.in_proj_weight = nn.Parameter(layer.self_attn.in_proj_weight.data)
        with pytest.warns(so.LostTagWarning):
            layer(torch.randn(2, 3, 8))
        layer(torch.randn(2, 3, 8))
    assert len(calls) == 2


def test_a_module_whose_forward_is_never_called_warns_when_it_is_read():
    """Attention multiplies by the weight of out_proj itself."""
    module = so.constrain(nn.MultiheadAttention(8, 2), "out_proj.weight")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.ones(2, 3, 8)
    module.load_state_dict(state)
    assert not warnings_of(lambda: module(x, x, x))
    for _ in range(2):
        module.load_state_dict(state, assign=True)
        with pytest.warns(so.LostTagWarning, match="`weight` of NonDynamicallyQuantizableLinear"):
            module(x, x, x)
        assert so.retag(module).out_proj.weight.manifold == Stiefel()


def test_a_parameter_of_the_same_type_is_read_as_recorded():
    """accelerate replaces a parameter by ``type(parameter)(value, requires_grad=...)``."""
    layer = so.constrain(nn.Conv2d(3, 8, 3))
    kind, value = type(layer.weight), layer.weight.data.clone()
    layer._parameters["weight"] = kind(value, requires_grad=layer.weight.requires_grad)
    assert layer.weight.manifold == Stiefel(flatten=True)
    assert not hooks(layer)
    assert kind(layer.weight).manifold == Stiefel(flatten=True)


def test_another_package_s_manifold_is_refused_by_name():
    layer = nn.Linear(4, 4)
    layer.weight.manifold = object()
    text = r"`weight.manifold` must be a so.Stiefel, got builtins.object; .*so.from_geoopt"
    for function in (so.constrain, so.report, so.retag, so.param_groups, so.orthonormality_error):
        with pytest.raises(TypeError, match=text):
            function(layer)
    with pytest.raises(TypeError, match=r"`parameter of shape \(4, 4\).manifold` must be a so.S"):
        so.orthonormality_error(layer.weight)
    assert type(layer.weight) is nn.Parameter


def test_vmapped_ensembles_do_not_warn():
    models = [attention() for _ in range(2)]
    values, _ = torch.func.stack_module_state(models)
    values = {name: value.detach() for name, value in values.items()}
    x = torch.randn(2, 3, 8)
    found = torch.func.vmap(lambda v, x: torch.func.functional_call(models[0], v, (x,)))(values, x)
    torch.testing.assert_close(found[1], models[1](x[1]))


def test_replicas_of_data_parallel_do_not_warn():
    """A replica holds plain tensors instead of parameters (torch/nn/parallel/replicate.py)."""
    layer = so.constrain(nn.Linear(4, 4))
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight * 1, layer.bias * 1
    torch.testing.assert_close(replica(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    torch.testing.assert_close(nn.DataParallel(layer)(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    assert readings(nn.DataParallel(layer)) == {"module.weight": Stiefel()}


def test_fully_shard_keeps_the_record(tmp_path):
    from torch import distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch was built without gloo")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = attention()
        x = torch.randn(2, 8)
        expected = model(x)
        fully_shard(model, mesh=mesh)
        assert isinstance(model.q.weight, DTensor)
        assert readings(model) == {}
        with pytest.warns(so.LostTagWarning):
            model(x)
        model.reshard()
        groups = so.param_groups(model)
        assert readings(model) == READINGS
        assert [group["stiefel"] for group in groups[1:]] == [
            READINGS["q.weight"].as_dict(),
            READINGS["k.weight"].as_dict(),
        ]
        torch.testing.assert_close(model(x), expected)
    finally:
        dist.destroy_process_group()


def test_state_dict_is_that_of_the_untagged_model():
    plain, tagged = Attention(), attention()
    assert list(plain.state_dict()) == list(tagged.state_dict())
    for mine, theirs in zip(tagged.state_dict().values(), plain.state_dict().values(), strict=True):
        assert type(mine) is torch.Tensor
        assert mine.shape == theirs.shape
    assert [name for name, _ in plain.named_buffers()] == [n for n, _ in tagged.named_buffers()]
    plain.load_state_dict(through_file(tagged.state_dict()))
    assert readings(plain) == {}
    assert torch.equal(plain.q.weight, tagged.q.weight)


# ---- retag and param_groups --------------------------------------------------------------------


def test_groups_by_kind_and_reading():
    model = attention()
    so.constrain(model.out, heads=2)
    groups = so.param_groups(
        model, lr=0.1, momentum=0.5, stiefel={"lr": 1.0}, plain={"momentum": 0.9}
    )
    assert groups == [
        {
            "params": [model.q.bias, model.out.bias],
            "lr": 0.1,
            "momentum": 0.9,
            "stiefel": None,
        },
        {
            "params": [model.q.weight, model.out.weight],
            "lr": 1.0,
            "momentum": 0.5,
            "stiefel": Stiefel(heads=2).as_dict(),
        },
        {
            "params": [model.k.weight],
            "lr": 1.0,
            "momentum": 0.5,
            "stiefel": Stiefel(scale=0.5).as_dict(),
        },
    ]


def test_groups_hold_every_parameter_once_also_frozen_ones():
    model = attention().requires_grad_(False)
    held = [parameter for group in so.param_groups(model) for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {
        id(parameter) for parameter in model.parameters()
    }
    assert len(held) == len(list(model.parameters()))


def test_groups_with_names_are_what_torch_accepts():
    model = attention()
    groups = so.param_groups(model, names=True)
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["q.bias", "out.weight", "out.bias"],
        ["q.weight"],
        ["k.weight"],
    ]


def test_groups_restore_lost_tags():
    model = replaced(attention())
    groups = so.param_groups(model)
    assert [len(group["params"]) for group in groups] == [3, 1, 1]
    assert readings(model) == READINGS


def test_tags_without_a_record_count():
    module = nn.Module()
    module.basis = so.ManifoldParameter(torch.eye(4), Stiefel(heads=2))
    (group,) = so.param_groups(module, lr=0.1)
    assert group == {"params": [module.basis], "lr": 0.1, "stiefel": Stiefel(heads=2).as_dict()}


def test_a_model_without_constraints_is_one_plain_group():
    layer = nn.Linear(2, 2)
    told = r"no parameter is constrained.*so.constrain\(module, 'weight'\)"
    with pytest.warns(UserWarning, match=told):
        (group,) = so.param_groups(layer, stiefel={"lr": 1.0})
    assert group == {"params": [layer.weight, layer.bias], "stiefel": None}
    assert so.retag(layer) is layer


def test_the_record_wins_over_a_tag():
    layer = so.constrain(nn.Linear(8, 8), heads=2)
    layer.weight.manifold = Stiefel(heads=4)
    assert so.retag(layer).weight.manifold == Stiefel(heads=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stiefel": {"params": []}}, ValueError, r"`stiefel` must not set 'params'"),
        ({"plain": {"stiefel": True}}, ValueError, r"`plain` must not set 'stiefel', got True"),
        ({"params": []}, ValueError, "`common` must not set 'params'"),
        ({"stiefel": 0.1}, TypeError, "`stiefel` must be a dict of options, got 0.1"),
        ({"names": 1}, TypeError, "`names` must be True or False, got 1"),
    ],
)
def test_groups_refuse(arguments, error, message):
    with pytest.raises(error, match=message):
        so.param_groups(attention(), **arguments)


def test_models_are_asked_for():
    for function in (so.param_groups, so.retag, so.report):
        with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got list"):
            function([])


def test_tied_parameters_must_be_constrained_alike():
    model = attention()
    so.constrain(model.k_again, scale=0.5)
    assert readings(so.retag(model)) == READINGS
    watch.records_of(model.k_again)["weight"] = Stiefel(scale=2.0)  # as others may write it
    with pytest.raises(
        ValueError, match=r"`k.weight and k_again.weight` must be constrained alike"
    ):
        so.retag(model)


TIED = {
    "heads": {"heads": 2, "scale": 0.5},
    "scale": {"scale": 2.0},
    "the other way": {"transposed": True, "scale": 0.5},
    "rows": {"rows": (0, 2), "scale": 0.5},
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("far", [False, True], ids=["one model", "two models"])
def test_another_reading_of_a_tied_weight_is_refused(case: str, far: bool) -> None:
    """Also where only the other model knows of the first constraint; release makes way."""
    model = attention()
    other = model.k_again
    if far:
        other = nn.Linear(8, 4)
        other.weight = model.k.weight
    before = model.k.weight.detach().clone()
    with pytest.raises(ValueError, match="`weight` must be read as `weight of Linear` is, to whi"):
        so.constrain(other, **TIED[case])
    assert torch.equal(model.k.weight, before)
    assert not watch.records_of(other)
    assert readings(so.retag(model)) == READINGS
    so.release(other)
    so.constrain(other, **TIED[case])
    assert so.orthonormality_error(other) < 1e-5


def test_tied_weights_are_read_anew_in_one_call() -> None:
    model = attention()
    so.constrain(model, "k*.weight", scale=0.5)
    so.constrain(model, "k*.weight", heads=2)
    assert model.k.weight.manifold == Stiefel(heads=2)
    with pytest.raises(ValueError, match=r"`k_again.weight` must be read as `weight of Linear`"):
        so.constrain(model, "k_again.weight", heads=4)
    so.constrain(model.k, heads=2)
    assert readings(so.retag(model))["k.weight"] == Stiefel(heads=2)


def test_a_kept_scale_of_a_tied_weight_is_the_first_one() -> None:
    """Measured again it differs by rounding, which is no other reading."""
    for seed in range(20):
        torch.manual_seed(seed)
        one, other = nn.Linear(9, 7), nn.Linear(9, 7)
        other.weight = one.weight
        so.constrain(one, scale="keep")
        first = one.weight.manifold
        so.constrain(other, scale="keep")
        assert other.weight.manifold == first == watch.records_of(other)["weight"]


def test_records_that_no_longer_fit_are_named():
    model = attention()
    model.q.weight = nn.Parameter(torch.zeros(7, 8))
    with pytest.raises(ValueError, match=r"`heads of q.weight` must divide its 7 rows"):
        so.param_groups(model)
    model = attention()
    with pytest.warns(so.LostTagWarning, match="no parameter any more") as caught:
        parametrize.register_parametrization(model.q, "weight", nn.Identity())
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match=r"`q.weight` must still be a parameter"):
        so.retag(model)


# ---- error and report --------------------------------------------------------------------------


def test_error_of_tensors_parameters_and_models():
    exact = torch.eye(4, dtype=torch.float64)
    assert so.orthonormality_error(exact) == 0
    assert so.orthonormality_error(2 * exact) == 3
    assert so.orthonormality_error(2 * exact, Stiefel(scale=2.0)) == 0
    assert so.orthonormality_error(so.ManifoldParameter(2 * exact, Stiefel(scale=2.0))) == 0
    blocks = torch.cat([exact, 2 * exact])
    assert so.orthonormality_error(blocks, Stiefel(heads=2)) == 3
    assert so.orthonormality_error(blocks, Stiefel(rows=(0, 4))) == 0
    assert so.orthonormality_error(exact[:2]) == 0  # wide: rows
    model = attention()
    with torch.no_grad():
        model.k.weight *= 3
    error = so.orthonormality_error(model)
    assert error == pytest.approx(8.0, rel=1e-5)
    assert error.shape == ()
    assert error.dtype == torch.float64
    assert not error.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_error_is_that_of_the_matrix_not_of_the_sum(dtype, generator):
    """X'X in the matrix's own dtype would round; here it is exact to float64."""
    matrix = torch.randn(300, 20, generator=generator, dtype=torch.float32).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = matrix.to(wide)
    expected = (exact.mH @ exact - torch.eye(20, dtype=wide)).abs().max()
    torch.testing.assert_close(so.orthonormality_error(matrix), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3),), ValueError, "`x` must have at least 2 dimensions"),
        ((torch.ones(2, 2, dtype=torch.int64),), TypeError, "`x` must have a floating-point dtype"),
        (([1.0],), TypeError, "`x` must be a tensor or a torch.nn.Module, got list"),
        ((nn.Linear(2, 2),), ValueError, "`x` must have a constrained parameter.*so.constrain"),
        ((attention(), Stiefel()), ValueError, "`manifold` must be None for a model"),
        ((torch.eye(3), "x"), TypeError, "`manifold` must be None or a Stiefel, got 'x'"),
        ((torch.ones(4, 2), Stiefel(heads=3)), ValueError, "`heads of x` must divide its 4 rows"),
    ],
)
def test_error_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        so.orthonormality_error(*arguments)


def test_report_is_a_table():
    model = attention()
    with torch.no_grad():
        model.k.weight.copy_(torch.eye(4, 8))
    text = str(so.report(model))
    assert repr(so.report(model)) == text
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == ["parameter", "shape", "reading", "moved", "error"]
    assert cells[2][:3] == ["q.weight", "8 x 8", "2 x (4 x 8), rows"]
    assert 0 < float(cells[2][3].rstrip("%")) < 300
    assert float(cells[2][4]) < 1e-6
    assert cells[3][:3] == ["k.weight", "4 x 8", "1 x (4 x 8), rows, scale 0.5"]
    assert cells[3][4:] == [
        "3.0e+00",
        "off: so.project_(model), or the next Stiefel step",
    ]
    assert len(cells) == 4
    found = {line.name: line.error for line in so.report(model).lines}
    assert max(found.values()) == so.orthonormality_error(model)
    assert "off" not in str(so.report(so.project_(model)))
    assert str(so.report(nn.ReLU())) == "no constrained parameters"


def test_values_that_are_not_finite_are_refused_before_any_is_written():
    net = nn.Sequential(*(so.constrain(nn.Linear(4, 4)) for _ in range(2)))
    with torch.no_grad():
        for number, parameter in enumerate(p for p in net.parameters() if p.ndim == 2):
            parameter.mul_(2 if number == 0 else torch.nan)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"`1\.weight` must be finite.*; initialise it first$"):
        so.project_(net)
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v.nan_to_num(), after[k].nan_to_num()) for k, v in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_makes_no_value_less_exact(dtype):
    layer = nn.Linear(32, 64)
    with torch.autocast("cpu", dtype=dtype):
        so.constrain(layer)
        assert so.orthonormality_error(layer) < 2e-6
        so.project_(layer)
        xi = so.project_tangent(layer.weight, torch.randn(64, 32)).detach()
    crossed = layer.weight.detach().T @ xi
    assert (crossed + crossed.T).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_tied_weight_is_released_below_any_of_its_owners(name: str) -> None:
    """``release`` looks at all modules in which something was constrained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    so.constrain(model, "*.weight")
    so.release(model.get_submodule(name[0]))
    assert not any(reading for _, reading in constraints.readings(model).values())
    assert all("weight" not in watch.records_of(layer) for layer in model)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((6, 6, 1, 1), ValueError, "more than one entry"),
        ((9, 1, 1), ValueError, "more than one entry"),
        ((8, 4, 3, 3), UserWarning, "flatten=True"),
        ((8, 16, 1, 5), UserWarning, "flatten=True"),
        *((shape, None, "") for shape in [(1, 1), (1, 1, 1), (12, 8, 16, 16), (3, 4, 4)]),
        ((2, 2, 5, 5), None, ""),
    ],
)
def test_a_kernel_of_a_module_of_ones_own_is_told_from_a_batch_of_matrices(shape, error, message):
    layer = holder(torch.randn(shape))
    if error is not None:
        with pytest.raises(error, match=message):
            so.constrain(layer)
        so.constrain(layer, flatten=True)
    else:
        so.constrain(layer, flatten=False if layer.weight[..., 0, 0].numel() > 1 else None)
