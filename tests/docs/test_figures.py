"""The figures in the pages show the numbers of the results files, and of the schedules."""

import json
import re
import statistics

from support.paths import ROOT
from support.scripts import imported

import shardopt as so


def page(name):
    return re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text())


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


def rows(name, heading):
    """Return the cells of the table whose header line begins with this."""
    lines = (ROOT / "docs" / name).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]
    ]


def test_the_table_of_schedules_is_what_they_say():
    table_rows = rows("pipeline.md", "schedule")
    assert len(table_rows) == 12
    for name, chunks, table, program, activations in table_rows:
        options = {"num_chunks": int(chunks)} if chunks != "1" and "_v`" not in name else {}
        schedule = getattr(so.schedules, name.strip("`"))(4, 8, **options)
        assert (table, program) == (
            f"{schedule.bubble_fraction:.1%}",
            f"{schedule.program_bubble_fraction:.1%}",
        ), name
        assert int(activations) == max(schedule.peak_activations), name


def test_the_times_of_schedules_are_those_of_their_compiled_passes():
    known = results("schedules")["schedules"]
    table_rows = rows("notes/pipelines.md", "by these passes")
    assert [name for name, *_ in table_rows] == list(known)
    for name, *numbers, activations in table_rows:
        step = known[name]["step"]
        assert numbers == [
            f"{1e3 * step[m][pace]:.0f}" for m in ("8", "32") for pace in ("program", "own_pace")
        ], name
        assert float(activations) == step["8"]["activations"]
        # of messages sent ahead every permute starts before the first pass of a tick and ends after
        # the last
        if "permutes_beside_passes" in known[name]["passes"]:
            permutes = 4 if "_v" in name else 2
            expected = permutes if "sent ahead" in name else 0
            assert known[name]["passes"]["permutes_beside_passes"] == expected, name
    split, fused_passes = (
        known[name]["passes"] for name in ("zero_bubble_lockstep", "eager_one_f_one_b")
    )
    numbers = [split[kind]["seconds"] for kind in ("forward", "backward", "weight")] + [
        fused_passes["backward"]["seconds"]
    ]
    assert rows("notes/pipelines.md", "a pass")[0][1:] == [
        f"{1e3 * seconds:.1f}" for seconds in numbers
    ]
    flops = [split[kind]["flops"] for kind in ("forward", "backward", "weight")] + [
        fused_passes["backward"]["flops"]
    ]
    assert rows("notes/pipelines.md", "a pass")[1][1:] == [f"{count / 1e12:.2f}" for count in flops]
    assert {split[kind]["flops"] for kind in ("forward", "backward", "weight")} == {
        fused_passes["backward"]["flops"] / 2
    }


def test_losses_of_compressed_runs():
    contenders = results("convergence")["contenders"]
    names = {"`exact(jnp.bfloat16)`": "bf16", "`int8()`": "int8"}
    for reducer, *cells in rows("notes/convergence.md", "reducer"):
        keys = [
            f"{names.get(reducer, reducer.strip('`'))}, {how}"
            for how in ("error feedback", "none", "no warm-up")
        ]
        assert cells == [
            f"{contenders[key]['ratio']:.3f}" if key in contenders else "" for key in keys
        ]
        assert [len(contenders[key]["losses"]) for key in keys if key in contenders][:2] == [3, 1]
    text = page("notes/convergence.md")
    for start, name in (
        ("outer momentum ends at ", "DiLoCo"),
        ("published 0.9 at ", "DiLoCo (momentum 0.9)"),
        ("Streaming DiLoCo at ", "Streaming DiLoCo"),
        ("Local SGD at ", "Local SGD"),
    ):
        assert f"{start}{contenders[name]['ratio']:.3f}" in text


def test_the_note_on_overhead_has_its_numbers():
    text = page("notes/overhead.md")
    overhead = results("overhead")
    peers = results("peers")["cpu"]["128x4"]
    ddp, fsdp = (overhead[name]["median_ratio"] for name in ("ddp", "fsdp"))
    assert f"median ratio {ddp:.3f} for ddp, {fsdp:.3f} for fsdp" in text
    beyond = results("import_time")["shardopt beyond jax"]["seconds, median"]
    assert f"takes {beyond:.2f} s beyond jax's own import" in text
    small_steps = results("small_steps")
    for name, row in small_steps["small"].items():
        more = [row[who] - row["plain"] for who in ("shardopt", "fit")]
        assert more[0] < 0.1
        assert more[1] < 0.2
        assert f"| {name} | {row['plain']:.3f} | {more[0]:.3f} | {more[1]:.3f} |" in text
    for name, row in small_steps["curves"].items():
        ratio = row["shardopt"] / row["plain"]
        assert not name.startswith("fsdp") or f" | {ratio:.2f} |" in text
    for name, row in results("proof_seconds")["losses"].items():
        seconds = f"{row['proof_seconds']:.3f} | {row['other_seconds']:.2f}"
        assert f"| {name} | {seconds} | {row['share']:.3f} |" in text

    text = page("notes/peers.md")

    def against(rival, group="processes"):
        return [
            value
            for key, value in peers[group]["speed_ratios"].items()
            if re.search(f"/ {rival}", key)
        ]

    ddp, zero1, fsdp = against("torch")
    assert f"at {ddp:.2f} (ddp), {zero1:.2f} (zero1) and {fsdp:.2f} (fsdp) of torch's speed" in text
    low = min(against("jax"))
    high = max(against("jax"))
    assert f"{low:.1f} to {high:.1f} times as fast as jax by hand" in text
    low = min(against("maxtext"))
    high = max(against("maxtext"))
    assert f"{low:.1f} to {high:.1f} times as fast as MaxText" in text
    assert {f"{value:.1f}" for value in against("levanter")} == {"2.2"}
    assert "2.2 times as fast as Levanter" in text
    sizes = [size["torch"] for size in results("peers")["cpu"].values()]
    assert len(sizes) == 4
    for cpu in sizes[0]:
        speed = [value for size in sizes for value in size[cpu]["speed_ratios"].values()]
        peak = [
            size[cpu]["contestants"][f"shardopt {name}"]["peak_bytes"]
            / size[cpu]["contestants"][f"torch {name}"]["peak_bytes"]
            for size in sizes
            for name in ("ddp", "zero1", "fsdp")
        ]
        assert (
            f"| {cpu} | {min(speed):.2f} to {max(speed):.2f} | {min(peak):.2f} to {max(peak):.2f} |"
            in text
        )
    ddp, zero1, fsdp = against("torch", "devices")
    assert (
        f"it is {ddp:.2f} (ddp), {zero1:.2f} (zero1) and {fsdp:.2f} (fsdp) of torch's speed" in text
    )


def test_the_note_on_matrices_has_the_losses_of_its_results():
    record = results("matrices")
    text = page("notes/matrices.md")
    for name, rate, loss, share in rows("notes/matrices.md", "optimizer"):
        row = record["runs"][name.strip("`")]
        wording = (
            f"{row['learning_rate']:g}",
            f"{statistics.mean(row['loss']):.3f}",
            f"{row['mean_share']:.2f}",
        )
        assert (rate, loss, share) == wording, name
    assert f"width 32, on one device, {record['steps']} steps" in text
    muon, soap = (record["runs"][name]["mean_share"] for name in ("muon", "soap"))
    wording = page("tour.md")
    assert f"on {muon:.2f} (Muon) and {soap:.2f} (SOAP) of the tokens" in wording


def test_the_note_on_matrices_has_the_comparison_with_torch():
    sizes = results("peers_muon")["sizes"]
    text = page("notes/matrices.md")
    names = {
        "AdamW, fsdp": "fsdp",
        "matrices": "muon",
        "within": "muon_within",
        "bf16": "muon",
        "fp32": "muon_fp32",
    }
    for library, how, *cells in rows("notes/matrices.md", "fsdp + Muon"):
        name = f"{library} {names[how]}"
        expected = []
        for size in sizes.values():
            expected += [
                f"{1e3 * size['seconds_a_step'][name]:.0f}",
                f"{size['bytes_a_step'][name] / 1e6:.1f}",
            ]
        assert cells == expected, name
    ratios = [size["ratios"] for size in sizes.values()]
    ours, torch_ratios, both = (
        [f"{size_ratios[key]:.2f}" for size_ratios in ratios]
        for key in (
            "shardopt muon / shardopt fsdp",
            "torch muon / torch fsdp",
            "shardopt muon / torch muon",
        )
    )
    assert (
        f"{ours[0]} and {ours[1]} times its AdamW's, torch's {torch_ratios[0]} and {torch_ratios[1]} times"
        in text
    )
    assert f"shardopt's takes {both[0]} and {both[1]} of torch's" in text
    assert f"takes {both[0]} to {both[1]} of one with torch's" in page("matrices.md")
    agree = max(size["differences"]["torch muon_fp32"]["loss"] for size in sizes.values())
    assert agree < 1e-6
    assert max(size["differences"]["torch muon"]["loss"] for size in sizes.values()) < 1e-3
    assert f"of torch {results('peers_muon')['torch'].partition('+')[0]}" in text


def test_the_note_on_convergence_has_the_numbers_of_8_bits():
    runs = results("eight_bit")["runs"]
    rounded = runs["8 bits"]
    plain = runs["fp32"]
    text = page("notes/convergence.md")
    share = rounded["state_bytes"] / plain["state_bytes"]
    assert f"ends at {rounded['ratio']:.3f} times the loss" in text
    assert f"takes {share:.2f} of the bytes" in text
    assert rounded["ratio"] < 1.01


def test_the_note_on_low_precision_has_its_losses():
    runs = results("low_precision")["loss"]
    text = page("notes/low_precision.md")
    exact = runs["float32"]["losses"]
    assert f"float32 has {statistics.mean(exact):.3f}:" in text
    for precision in ("fp8", "int8"):
        loss_increases = [b - a for a, b in zip(exact, runs[precision]["losses"], strict=True)]
        mean = statistics.mean(loss_increases)
        error = statistics.stdev(loss_increases) / len(loss_increases) ** 0.5
        assert len(loss_increases) == 6
        assert (
            f"| {precision} | {mean:.3f} | {error:.3f} | {min(loss_increases):.3f} to {max(loss_increases):.3f} |"
            in text
        )
    assert f"int8 costs {mean:.3f} nats, with a standard error of {error:.3f}" in page("models.md")
    assert f"int8: {mean:.3f} nats, with a standard error of {error:.3f}," in page("benchmarks.md")


def test_the_note_on_low_precision_has_its_times_of_products():
    products = results("low_precision")["product"]
    text = page("notes/low_precision.md")
    plain, rounded = (
        products[f"v6e:2x2 {precision}, default VMEM"]["milliseconds"]
        for precision in ("bfloat16", "int8")
    )
    assert f"| together | {plain:.2f} | {rounded:.2f} |" in text
    assert f"int8 takes {rounded / plain:.2f} times as long" in text


def test_work_of_pipelines():
    record = results("pipeline")
    table_rows = rows("notes/pipelines.md", "work of a step over no pipeline's")
    columns = [(part, size) for part in ("keeping", "recomputing") for size in ("large", "small")]
    names = list(record["keeping"]["large"]["runs"])[1:]
    assert [name for name, *_ in table_rows] == names
    for name, *cells in table_rows:
        assert cells == [
            f"{record[part][size]['runs'][name]['of_plain']:.2f}" for part, size in columns
        ], name
    assert max(row["ratio"] for row in record["program"].values()) < 1.004
    megabytes = {name: f"{size / 1e6:.1f}" for name, size in record["passes"]["bytes"].items()}
    text = page("notes/pipelines.md")
    assert (
        f"B leaves {megabytes['backward']} MB, and W reads these and {megabytes['forward for weight']} of the"
        in text
    )
    assert f"of the {megabytes['forward']} MB that the forward leaves" in text
    assert record["passes"]["operations"]["repeated"] < 0.001


def test_asynchronous_runs():
    text = page("notes/asynchronous.md")
    slow = results("stragglers")["runs"]["one slower"]["None"]
    claims = (
        f"{slow['ratio']:.2f} times the pushes",
        f"(formula {slow['formula_ratio']:.2f}, simulator {slow['simulated_ratio']:.2f}",
    )
    islands = results("async_local_sgd")["summary"]["asynchronous"]
    claims += (
        f"(x {islands['loss']:.3f}, three seeds)",
        f"in {islands['seconds']:.2f} of its time",
    )
    claims += (
        f"in {results('server')['apply']['adamw']['ratio']:.2f} times the time of optax alone",
    )
    for words in claims:
        assert words in text, words


def test_the_note_on_restarts_has_its_numbers():
    record = results("restarts")
    text = page("notes/restarts.md")
    step = record["first new step"]
    lost = record["steps lost"]
    assert f"comes after {step['memory']:.1f} s from memory" in text
    assert f"after {step['disk']:.1f} s from the disk" in text
    assert f"ratio of {record['rounds']} pairs is {step['ratio, median']:.2f}" in text
    assert f"({min(step['ratios']):.2f} to {max(step['ratios']):.2f})" in text
    assert f"Steps lost: {lost['memory']} against {lost['disk']}" in text
    assert f"at most {lost['largest, memory']} against {lost['largest, disk']}" in text


def test_the_note_on_the_tpu_compiler_has_its_numbers():
    compiled = results("pod")["compiles"]
    table_rows = rows("notes/tpu_compiler.md", "model")
    assert len(table_rows) == 16
    cells = {tuple(row[3:]) for row in table_rows}
    for program in compiled:
        seconds = f"{program['compile_seconds']:.0f}"
        if program.get("compile_cpu_seconds"):
            seconds += f" ({program['compile_cpu_seconds']:.0f})"
        memory = f"{program['peak_bytes'] / 1e9:.2f} of {program['hbm_bytes'] / 1e9:.0f}"
        ratios = (
            f"{program['arguments_ratio']:.4f}",
            f"{program['memory_ratio']:.3f}",
            f"{program['flops_ratio']:.3f}",
        )
        assert (seconds, memory, *ratios) in cells or program[
            "name"
        ] == "llama3-8b v5p:4x4x4 replica=2 tensor=1", program["name"]


def test_the_note_on_long_rows_has_its_numbers():
    text = page("notes/long_rows.md")
    measurements = {(row["length"], row["context"]): row for row in results("long_context")}
    for (length, context), row in measurements.items():
        memory = f"{row['peak_bytes'] / 1e9:.1f} of {row['hbm_bytes'] / 1e9:.0f}"
        assert f"| {row['topology']} | {length:,} | {context} | {row['rows']} | {memory} |" in text
        assert f"| {row['step_milliseconds'] / 1e3:.2f} s |" in text
    summary = page("long_sequences.md")
    assert (
        f"131,072 tokens fits on 64 v5p chips at {measurements[131_072, 8]['peak_bytes'] / 1e9:.0f} GB"
        in summary
    )
    assert (
        f"a million on 512 at {measurements[1_048_576, 64]['peak_bytes'] / 1e9:.0f} GB" in summary
    )


def test_the_note_on_predictions_has_its_numbers():
    text = page("notes/predictions.md")
    pod = results("pod")
    for held_out, hits in ((False, "21 of 21"), (True, "8 of 10")):
        ratios = [row["memory_ratio"] for row in pod["memory"] if row["held_out"] is held_out]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        assert f"median {statistics.median(ratios):.3f}, worst {worst:.3f} | 10%: {hits}" in text
    for row in pod["published"]:
        cells = f"{row['predicted']:.1%} | {row['published']:.1%} | {row['ratio']:.2f}"
        assert f"| {row['name']} | {cells} |" in text
    for row in pod["diloco"]:
        pairs = zip(row["predicted_gbit"], row["paper_gbit"], strict=True)
        assert (
            f"| {row['name']} |"
            f" {' | '.join(f'{ours:.3g} / {paper_gbit:g}' for ours, paper_gbit in pairs)} |" in text
        )
    assert sum(row["within_a_rung"] for row in pod["diloco"]) == 72


def test_the_losses_of_experts_are_those_of_the_benchmark():
    record = results("experts")
    text = page("notes/experts.md")
    assert all(record["claims"].values())
    losses = {
        name: [f"{run['loss']:.3f}" for run in contender["runs"]]
        for name, contender in record["contenders"].items()
    }
    for name in ("experts, biases", "experts, loss", "dense"):
        assert "{}, {} and {}".format(*losses[name]) in text, name
    worst = {
        name: max(run["imbalance"] for run in contender["runs"])
        for name, contender in record["contenders"].items()
    }
    assert f"at most {worst['experts, biases']:.2f} times" in text
    assert f"up to {worst['experts, nothing']:.2f} times" in text


def test_the_note_on_experts_has_the_numbers_of_the_tpu_compiler():
    record = results("experts_pod")
    with imported("experts_pod") as script:
        cells = script.cells
    assert rows("notes/experts.md", "compiled") == [
        cells(name, row["shardopt"]) for name, row in record.items()
    ]
    for name, row in record.items():
        program = row["shardopt"]
        assert abs(program["memory_ratio"] - 1) < 0.05, name
        assert abs(program["arguments_ratio"] - 1) < 1e-3, name
        assert (
            max(program["weights_ratio"], program["flops_ratio"], program["active_ratio"]) < 1.05
        ), name
    text = page("notes/experts.md")
    programs = [row["shardopt"] for row in record.values()]
    active = "{:.2f} (Mixtral) and {:.2f} (DeepSeek-V3)".format(
        *(programs[i]["active_ratio"] for i in (0, -1))
    )
    assert f"a step has {active} times the active flops" in text
    overlap = programs[-1]["tile_overlap"]
    assert f"{overlap:.2f} times for DeepSeek-V3's 4,096 rows" in text
    assert f"of twice the `chunk` {(overlap + 1) / 2:.2f}." in text
    fsdp, over = (record[f"mixtral-8x7b v5p:4x4x4 expert={size}"] for size in (1, 8))
    deepseek = record["deepseek-v3 v5p:16x16x16 expert=64 replica=8"]
    memory = [
        program["memory"]["arguments"]
        + program["memory"]["temporary"]
        + program["memory"]["outputs"]
        - program["memory"]["aliased"]
        for program in (
            fsdp["maxtext"],
            over["maxtext"],
            fsdp["left_to_xla"],
            deepseek["left_to_xla"],
        )
    ]
    assert (
        f"{memory[2] / 1e9:.2f} (Mixtral, v5p, expert=1) and {memory[3] / 1e9:.2f} GB"
        " (DeepSeek-V3), and are est" in text
    )
    assert all(
        row["left_to_xla"]["seconds"] >= row["shardopt"]["seconds"] for row in record.values()
    )
    assert (
        f"to {fsdp['maxtext']['seconds'] * 1e3:.0f} ms by the same estimates and"
        f" {memory[0] / 1e9:.2f} GB" in text
    )
    seconds = over["maxtext"]["seconds"] * 1e3, over["shardopt"]["seconds"] * 1e3
    sentence = (
        f"{memory[1] / 1e9:.2f} GB, and by estimates that count all rows {seconds[0]:.0f} ms where"
        " shardopt's are"
    )
    assert f"{sentence} {seconds[1]:.0f}." in text
    v6e = [record[f"mixtral-8x7b v6e:8x8 expert={size}"] for size in (1, 8)]
    seconds = [
        v6e[0]["maxtext"]["seconds"],
        v6e[1]["maxtext"]["seconds"],
        v6e[1]["shardopt"]["seconds"],
    ]
    assert f"v5p chips, {seconds[0] * 1e3:.0f} ms and" in text
    assert f"{seconds[1] * 1e3:.0f} ms where shardopt's are {seconds[2] * 1e3:.0f}." in text


def test_the_page_of_all_benchmarks_has_the_numbers_of_each():
    text = page("benchmarks.md")
    losses = results("convergence")["contenders"]
    eight_bit = results("eight_bit")["runs"]
    share = eight_bit["8 bits"]["state_bytes"] / eight_bit["fp32"]["state_bytes"]
    tokens = results("matrices")["runs"]
    muon = [
        size["ratios"]["shardopt muon / torch muon"]
        for size in results("peers_muon")["sizes"].values()
    ]
    step = results("restarts")["first new step"]
    slow = results("stragglers")["runs"]["one slower"]["None"]["ratio"]
    work = [
        row["of_plain"]
        for name, row in list(results("pipeline")["keeping"]["large"]["runs"].items())[1:]
    ]
    proof = [row["share"] for row in results("proof_seconds")["losses"].values()]
    memory = [
        row["memory_ratio"]
        for name, row in results("beside_maxtext").items()
        if name.startswith("llama3-8b") and "=" not in name
    ]
    claims = [
        (
            "error feedback with `int8` | held-out loss times"
            f" {losses['int8, error feedback']['ratio']:.3f}"
        ),
        f"DiLoCo, H = 50, four replicas | held-out loss times {losses['DiLoCo']['ratio']:.3f}",
        f"held-out loss times {eight_bit['8 bits']['ratio']:.3f}, {share:.2f} of the bytes",
        (
            f"on {tokens['muon']['mean_share']:.2f} and {tokens['soap']['mean_share']:.2f} of the"
            " tokens"
        ),
        f"{muon[0]:.2f} and {muon[1]:.2f} of the time of torch's Muon",
        (
            f"back after {step['memory']:.1f} s from memory, and after {step['disk']:.1f} s from"
            " the disk"
        ),
        f"makes {slow:.2f} times the pushes",
        f"{min(work):.2f} to {max(work):.2f} of the work",
        f"{min(proof):.0%} to {max(proof):.0%} of it",
        f"is {min(memory):.2f} to {max(memory):.2f} of MaxText's for Llama 3 8B without tensor",
    ]
    for words in claims:
        assert words in " ".join(text.split()), words


def test_the_note_on_compiler_errors_has_the_sums_between_processes():
    for (jaxlib, *cells), name in zip(
        rows("notes/compiler_errors.md", "jaxlib"),
        ("process_sums", "process_sums_0.12"),
        strict=True,
    ):
        record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        measured = record["results"]
        wrong = [
            f"{measured['wrong'][how]} of {measured['rounds']}"
            for how in ("reduce_scatter", "exchange")
        ]
        assert cells == [*wrong, f"{measured['reduce_scatter / exchange']['median']:.2f}"]
        assert jaxlib == record["versions"]["jaxlib"]


def test_the_page_on_adapters_has_their_memory_and_traffic():
    text = page("howto/lora.md")
    compiled = results("adapters_pod")
    assert not compiled["llama3-8b v5e:2x4, all parameters"]["fits"]
    for base, name in (("bf16", "bfloat16"), ("int8", "int8")):
        row = compiled[f"llama3-8b v5e:2x4, lora on {base}"]
        memory = row["peak_bytes"] / 1e9
        sent = row["wire_bytes"] / 1e9
        assert f"| adapters, base in {name} | {memory:.2f} GB | {sent:.1f} GB |" in text


def test_goodput_next_to_published_runs():
    runs = results("goodput")["rows"]
    shown = rows("notes/goodput.md", "run")
    assert len(shown) == len(runs)
    for (name, published, predicted, simulated, points, kind), run in zip(shown, runs, strict=True):
        assert name == run["run"]
        assert (published, predicted) == (
            f"{run['published']:.0%}",
            f"{run['predicted']:.1%}",
        ), name
        assert simulated == ("-" if run["simulated"] is None else f"{run['simulated']:.1%}"), name
        assert (float(points), kind) == (run["points"], run["kind"]), name
        if run["kind"] == "prediction":
            assert run["within"] == (abs(run["points"]) <= 5)
    real = results("goodput_real")
    shown = rows("notes/goodput.md", "of the four attempts")
    assert [(name, goodput) for name, goodput, *_ in shown] == [
        (name, f"{real[name]['goodput']:.1%}") for name in ("measured", "predicted", "simulated")
    ]
    assert f"differ by {abs(real['points']):.1f} points" in page("notes/goodput.md")
    assert real["holds"] == (abs(real["points"]) <= 3)


def test_the_page_on_silent_corruption_has_its_numbers():
    record = results("silent_corruption")
    name = "howto/silent_corruption.md"
    expected_rows = [
        [strategy, every, f"{row['flops']:.3f}", f"{row['bytes sent']:.3f}"]
        for strategy, costs in record["cost"].items()
        for every, row in costs["times a plain step, by k"].items()
    ]
    assert rows(name, "strategy | k") == expected_rows
    counts = ("change the state", "found", "named")
    expected_rows = [
        [strategy, *(f"{row['all'][count]:,}" for count in counts)]
        for strategy, row in record["faults, k = 1"].items()
    ]
    assert rows(name, "strategy | faults that change the state") == expected_rows
    further = record["faults in matrices and experts"]
    expected_rows = [
        [setting, *(f"{row['all'][count]:,}" for count in (*counts, "suspected"))]
        for setting, row in further.items()
    ]
    assert rows(name, "strategy, k = 1") == expected_rows
    assert all(
        row["all"]["suspected"] == row["all"]["change the state"] for row in further.values()
    )
    kinds = ("transient", "stuck", "a stored shard")
    expected_rows = [
        [setting, *(f"{row[kind]['found']} of {row[kind]['change the state']}" for kind in kinds)]
        for setting, row in record["faults, k > 1"].items()
    ]
    assert rows(name, "strategy, k") == expected_rows
    clean = record["clean steps"]
    assert (sum(clean["steps"].values()), clean["false alarms"]) == (100_000, 0)
    assert "In 100,000 verified steps without a fault there was no false alarm." in page(name)


def test_the_page_on_loss_spikes_has_the_costs_of_norms():
    record = results("norms_cost")
    name = "howto/loss_spike.md"
    expected_rows = [
        [
            *row_name.partition(",")[0::2],
            f"{row['share of a step']['flops']:.2%}",
            f"{row['share of a step']['bytes sent']:.3%}",
            f"{row['share of a step']['seconds']:.1%}",
            str(row["smallest k"]["seconds"]),
        ]
        for row_name, row in record.items()
    ]
    expected_rows = [
        [strategy, size.strip().partition(",")[0], *shares]
        for strategy, size, *shares in expected_rows
    ]
    assert rows(name, "strategy | width x layers") == expected_rows
    assert (
        f"With `norms_every={max(row['smallest k']['seconds'] for row in record.values())}` or"
        " more" in page(name)
    )
    read = [row["share of a step"]["bytes accessed"] for row in record.values()]
    assert f"{min(read):.0%} to {max(read):.0%} of the bytes of a plain step" in page(name)
    assert {row["further reduced arrays"] for row in record.values()} == {1}
    assert max(row["further all-reduces"] for row in record.values()) == 1


def test_the_page_on_nans_has_the_times_of_find_nan():
    record = results("find_nan")
    name = "howto/debug_a_nan.md"
    expected_rows = [
        [*row_name.split(", "), f"{row['core seconds']:.1f}"]
        for row_name, row in record["searches"].items()
    ]
    assert rows(name, "strategy | bad values") == expected_rows
    assert f"a GPT of {record['parameters'] / 1e6:.1f} million parameters" in page(name)


def test_the_table_of_how_cost_grows_has_the_ratios():
    record = results("growth")
    measured = {f"first step, {name}": row for name, row in record["first"].items()}
    measured |= {f"trace and lowering, {name}": row for name, row in record["lower"].items()}
    for label, ddp, fsdp, _ in rows("benchmarks.md", "what | ddp | fsdp")[:7]:
        kind, name = label.split(", ")
        ratios = [measured[f"{kind}, {strategy}, {name}"]["ratio"] for strategy in ("ddp", "fsdp")]
        assert [ddp, fsdp] == [f"{ratio:.2f}" for ratio in ratios]
    stated = [row[2] for row in rows("benchmarks.md", "what | ddp | fsdp")[7:]]
    ratios = [*record["init"].values(), record["restore"]["processor"]]
    assert stated == [f"{row['ratio']:.2f}" for row in ratios]
    first, second = record["report"]["5000"]
    assert f"takes {first:.2f} s, then {second:.2f} s" in page("benchmarks.md")


def test_the_page_on_same_bits_has_the_programs_for_chips():
    compiled = results("same_bits_on_chips")
    for name, *ratios in rows("same_bits.md", "by schedule | v5p"):
        prices = [compiled[f"{name} on {c}"]["milliseconds by schedule"] for c in ("v5p", "v6e")]
        assert ratios == [f"{price['ratio']:.2f}" for price in prices]
    equal = [
        compiled[f"{name} on v5p"][f"{chips} chips"]["other than for one chip"]
        for name, chips in (("ddp", 2), ("fsdp", 2), ("fsdp", 8))
    ]
    assert equal == [[], [], []]
