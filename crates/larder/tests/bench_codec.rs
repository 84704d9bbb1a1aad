//! `larder bench codec`.

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

const PAGE: usize = 4096;
const METHODS: [&str; 6] = ["lz4", "lz4-fast", "words-lz4", "zstd-fast", "zstd", "deflate"];
/// Options of a short measurement, whose numbers are meaningless.
const SHORT: [&str; 6] = ["--sample", "1MiB", "--seconds", "0.001", "--batch", "1,64"];

/// Runs the command; returns exit status, standard output and standard error.
fn bench(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(support::larder_path());
    let output = command.args(["bench", "codec"]).args(arguments).output();
    let output = output.expect("larder starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("it exits"), text(&output.stdout), text(&output.stderr))
}

fn bench_json(arguments: &[&str]) -> Value {
    let (code, out, err) = bench(&[arguments, &["--output", "json"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    serde_json::from_str(&out).expect("JSON")
}

/// Returns the measurement of the memory in `path`.
fn of_file(path: &Path, sample: &str) -> Value {
    let path = path.to_str().expect("a path of text");
    let arguments = ["--memory", path, "--sample", sample, "--method", "uniform", "--seconds", "0.001"];
    let report = bench_json(&arguments);
    let [memory] = list(&report["memories"]) else {
        panic!("the file's memory alone: {report}");
    };
    assert_eq!(memory["name"], path);
    memory.clone()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn result<'a>(memory: &'a Value, method: &str, batch: impl Into<Value>) -> &'a Value {
    let batch = batch.into();
    let mut results = list(&memory["results"]).iter();
    let found = results.find(|result| result["method"] == method && result["batch-pages"] == batch);
    found.unwrap_or_else(|| panic!("{method}, {batch} is in {memory}"))
}

/// Returns pages that each consist of one repeated word, a different one for each page.
fn numbered(pages: usize) -> Vec<u8> {
    (1..=pages as u64).flat_map(|page| (page << 40 | page).to_le_bytes().repeat(PAGE / 8)).collect()
}

/// Returns incompressible bytes.
fn random(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..bytes / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Every method is measured with every kind of memory and every batch size.
#[test]
fn methods_kinds_and_batches_are_measured() {
    let report = bench_json(&SHORT);
    let memories = list(&report["memories"]);
    let names: Vec<&Value> = memories.iter().map(|memory| &memory["name"]).collect();
    assert_eq!(names, ["zeros", "text", "heap", "sequence", "random"]);
    for memory in memories {
        assert_eq!(memory["bytes"], 1 << 20);
        assert_eq!(memory["file-bytes"], Value::Null);
        for method in ["none", "uniform", "delta"] {
            result(memory, method, Value::Null);
        }
        for method in METHODS {
            for batch in [1, 64] {
                result(memory, method, batch);
            }
        }
        for result in list(&memory["results"]) {
            for figure in ["megabytes-per-second", "cpu-seconds-per-gibibyte"] {
                for direction in ["encode", "decode"] {
                    assert!(number(&result[format!("{direction}-{figure}")]) > 0.0, "{result}");
                }
            }
            let left = number(&result["bytes-left"]);
            assert!((number(&result["ratio"]) - f64::from(1 << 20) / left).abs() < 1e-6, "{result}");
        }
        assert_eq!(result(memory, "none", Value::Null)["ratio"], 1.0);
        assert!(number(&result(memory, "delta", Value::Null)["ratio"]) > 20.0);
    }
    let [zeros, text, _, sequence, random] = memories else {
        panic!("five kinds");
    };
    assert!(number(&zeros["uniform-pages"]) > 200.0 && text["uniform-pages"] == 0);
    assert!(number(&result(zeros, "uniform", Value::Null)["ratio"]) > 5.0);
    assert!(number(&result(text, "zstd", 64)["ratio"]) > number(&result(text, "zstd", 1)["ratio"]));
    assert!(number(&result(text, "zstd", 1)["ratio"]) > 2.0);
    assert!(number(&result(sequence, "words-lz4", 64)["ratio"]) > 5.0);
    for method in METHODS {
        assert_eq!(result(random, method, 64)["ratio"], 1.0, "{method}");
    }
}

/// Each accelerator is either measured or listed as missing, with the reason.
#[test]
fn accelerator_is_measured_or_missing() {
    let arguments = [&SHORT[..], &["--kind", "text", "--method", "deflate"]].concat();
    let report = bench_json(&arguments);
    let names = |of: &Value, key| -> BTreeSet<String> {
        let names = list(of).iter().map(|one| one[key].as_str().expect("a name").to_owned());
        names.collect()
    };
    let (there, missing) = (names(&report["memories"][0]["results"], "by"), names(&report["missing"], "name"));
    for name in ["igzip", "qat", "iaa"] {
        assert!(there.contains(name) != missing.contains(name), "{name}: {report}");
    }
    // Without igzip its method is still measured, by another implementation.
    assert!(there.contains("igzip") != there.contains("zlib-rs"), "{report}");

    let (code, out, err) = bench(&arguments);
    assert_eq!((code, err.as_str()), (0, ""));
    let line = out.lines().find_map(|line| line.strip_prefix("Not available: ")).unwrap_or_default();
    for one in list(&report["missing"]) {
        let (name, why) = (one["name"].as_str().expect("a name"), one["why"].as_str().expect("a reason"));
        assert!(why.len() > 10 && line.contains(&format!("{name} ({why})")), "{out}");
        let (code, out, err) = bench(&["--method", name]);
        assert_eq!((code, out.as_str(), err), (2, "", format!("larder: --method {name}: {why}\n")));
    }
    for name in there {
        assert!(out.lines().any(|line| line.split_whitespace().nth(1) == Some(&name)), "{name}: {out}");
        assert!(!line.contains(&name), "{out}");
    }
}

#[test]
fn text_table_has_requested_methods() {
    let (code, out, err) = bench(&[
        "--kind",
        "text",
        "--kind",
        "counter",
        "--method",
        "uniform",
        "--method",
        "lz4",
        "--batch",
        "4,64",
        "--sample",
        "256KiB",
        "--seconds",
        "0.001",
    ]);
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    let begin = |at: usize, words: usize| lines[at][..words].join(" ");
    assert_eq!(lines[0].join(" "), "text: 256 KiB; 0.0 % of the pages repeat one word");
    assert_eq!(lines[2].join(" "), "method by pages ratio encode MB/s decode MB/s encode CPU s/GiB decode CPU s/GiB");
    assert_eq!([begin(3, 3), begin(4, 3), begin(5, 3)], ["uniform cpu -", "lz4 cpu 4", "lz4 cpu 64"]);
    for line in &lines[3..6] {
        assert_eq!(line.len(), 8, "{out}");
        assert!(line[3..].iter().all(|figure| figure.parse::<f64>().is_ok()), "{out}");
    }
    assert_eq!(begin(7, 3), "counter: 256 KiB;");
    assert!(out.contains("CPU") && !out.contains("zstd") && !out.contains("Not available"), "{out}");
}

/// A sample covers a memory file evenly, and leaves out a partial page at its end.
#[test]
fn memory_file_is_sampled_evenly() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("web.mem");
    let mut bytes = numbered(1024);
    bytes.extend(random(1024 * PAGE));
    // The file ends within a page, as after an interrupted dump.
    bytes.extend([1; 100]);
    std::fs::write(&path, &bytes).expect("a file");

    let whole = of_file(&path, "1GiB");
    assert_eq!((&whole["bytes"], &whole["file-bytes"]), (&json!(8 << 20), &json!(8 << 20)));
    assert_eq!(whole["uniform-pages"], 1024);
    assert_eq!(whole["results"][0]["bytes-left"], 1024 * 8 + 1024 * PAGE);
    for (sample, pages) in [("1MiB", 256), ("2MiB", 512), ("4KiB", 1), ("999KiB", 249)] {
        let sampled = of_file(&path, sample);
        assert_eq!((&sampled["bytes"], &sampled["file-bytes"]), (&json!(pages * PAGE), &json!(8 << 20)));
        let uniform = number(&sampled["uniform-pages"]) / pages as f64;
        assert!(pages == 1 || (uniform - 0.5).abs() < 0.02, "{sampled}");
    }
    let (code, out, _) = bench(&["--memory", path.to_str().expect("text"), "--method", "none", "--sample", "1MiB"]);
    let head =
        format!("{}: 1 MiB sampled evenly from its 8 MiB; 50.0 % of the pages repeat one word\n", path.display());
    assert_eq!((code, out.lines().next()), (0, Some(head.trim_end())));
    // Generated memory is measured in addition only on request.
    let arguments =
        ["--memory", path.to_str().expect("text"), "--kind", "json", "--method", "none", "--sample", "4KiB"];
    let both = bench_json(&arguments);
    assert_eq!(list(&both["memories"]).len(), 2);
    assert_eq!(both["memories"][1]["name"], "json");
}

/// Dumps, in each format, the memory of a QEMU with numbered pages from 1 MiB on in a stopped guest of 16 MiB.
fn dumps(folder: &Path) {
    let pattern = folder.join("pattern");
    std::fs::write(&pattern, numbered(1024)).expect("a file");
    let loader = format!("loader,file={},addr=0x100000,force-raw=on", pattern.display());
    let mut qemu = Command::new("qemu-system-x86_64")
        .args(["-m", "16", "-S", "-nodefaults", "-display", "none", "-qmp", "stdio", "-device", &loader])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-system-x86_64 is installed");
    let (mut to, from) = (qemu.stdin.take().expect("a pipe"), qemu.stdout.take().expect("a pipe"));
    let mut lines = BufReader::new(from).lines();
    let file = |name: &str| folder.join(name).display().to_string();
    let dump = |name: &str, format: &str| {
        json!({ "execute": "dump-guest-memory", "arguments":
            { "paging": false, "protocol": format!("file:{}", file(name)), "format": format } })
    };
    for command in [
        json!({ "execute": "qmp_capabilities" }),
        dump("elf", "elf"),
        dump("kdump", "kdump-zlib"),
        json!({ "execute": "pmemsave", "arguments": { "val": 0, "size": 16 << 20, "filename": file("raw") } }),
        json!({ "execute": "quit" }),
    ] {
        // Written in one piece, because QEMU executes a command before the end of its line.
        to.write_all(format!("{command}\n").as_bytes()).expect("QEMU reads");
        loop {
            let line = lines.next().expect("QEMU answers").expect("text");
            let answer: Value = serde_json::from_str(&line).expect("JSON");
            assert_eq!(answer["error"], Value::Null, "{command}");
            if answer["return"] != Value::Null {
                break;
            }
        }
    }
    assert!(qemu.wait().expect("QEMU ends").success());
}

/// Raw and ELF dumps that QEMU writes yield the same pages, aligned as in the guest.
#[test]
fn qemu_dumps_yield_guest_memory() {
    let folder = support::temp_dir_on_tmpfs();
    dumps(folder.path());
    let raw = of_file(&folder.path().join("raw"), "1GiB");
    assert_eq!(raw["file-bytes"], 16 << 20);
    // Apart from the numbered pages only the firmware may be non-uniform.
    let others = 4096.0 - number(&raw["uniform-pages"]);
    assert!(others < 256.0, "{raw}");
    // The dump has the same pages, with the firmware at other offsets. Pages at wrong offsets would not be uniform.
    let elf = of_file(&folder.path().join("elf"), "1GiB");
    assert!(number(&elf["file-bytes"]) >= f64::from(16 << 20), "{elf}");
    let others = number(&elf["file-bytes"]) / PAGE as f64 - number(&elf["uniform-pages"]);
    assert!(others < 256.0, "{elf}");
    let path = folder.path().join("kdump");
    let (code, out, err) = bench(&["--memory", path.to_str().expect("text")]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.ends_with("is a dump that is compressed already: have QEMU write it without -z, -l and -s\n"), "{err}");
}

/// Returns an ELF file of this class and type with two segments of `pages` pages each, at unaligned offsets.
fn elf(class: u8, kind: u16, load: u32, pages: usize) -> Vec<u8> {
    let offsets = [777, 777 + pages * PAGE + 5];
    let mut file = b"\x7fELF".to_vec();
    file.extend([class, 1, 1]);
    file.resize(16, 0);
    file.extend(kind.to_le_bytes());
    file.resize(32, 0);
    file.extend(64_u64.to_le_bytes());
    file.resize(54, 0);
    file.extend(56_u16.to_le_bytes());
    file.extend(2_u16.to_le_bytes());
    file.resize(64, 0);
    for offset in offsets {
        file.extend(load.to_le_bytes());
        file.extend(7_u32.to_le_bytes());
        for field in [offset, 0, 0, pages * PAGE, pages * PAGE, 0] {
            file.extend((field as u64).to_le_bytes());
        }
    }
    for offset in offsets {
        file.resize(offset, 0xee);
        file.extend(numbered(pages));
    }
    file
}

/// A core dump's pages are read at the offsets of its segments; another ELF file is read as plain bytes.
#[test]
fn core_dump_pages_come_from_segments() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("core");
    std::fs::write(&path, elf(2, 4, 1, 100)).expect("a file");
    for sample in ["1GiB", "400KiB"] {
        let dump = of_file(&path, sample);
        assert_eq!(dump["file-bytes"], 200 * PAGE);
        assert_eq!(number(&dump["uniform-pages"]) * PAGE as f64, number(&dump["bytes"]));
    }
    // An executable is no dump, so its bytes are read as they are.
    std::fs::write(&path, elf(2, 2, 1, 100)).expect("a file");
    assert_eq!(of_file(&path, "1GiB")["uniform-pages"], 0);
}

#[test]
fn file_without_memory_is_refused() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("memory");
    let name = path.to_str().expect("text");
    let mut cut_off = elf(2, 4, 1, 10);
    cut_off.truncate(18 * PAGE);
    let mut no_table = elf(2, 4, 1, 10);
    no_table[39] = 0x7f;
    let mut many = elf(2, 4, 1, 10);
    many[56..58].fill(0xff);
    let mut odd = elf(2, 4, 1, 10);
    odd[54] = 57;
    let cases: [(Vec<u8>, String); 9] = [
        (Vec::new(), format!("{name} is empty")),
        (vec![1; 4095], format!("{name} has 4095 bytes: that is less than a page, which has 4096")),
        (
            b"KDUMP   ".repeat(1000),
            format!("{name} is a dump that is compressed already: have QEMU write it without -z, -l and -s"),
        ),
        (
            elf(1, 4, 1, 10),
            format!(
                "cannot read the core dump {name}: it is not a dump of a 64-bit little-endian machine; give the memory as pmemsave writes it"
            ),
        ),
        (
            cut_off,
            format!(
                "cannot read the core dump {name}: it is truncated: not all of the 40960 bytes at 41742 are within the file's 73728"
            ),
        ),
        (no_table, format!("cannot read the core dump {name}: its program headers cannot be read")),
        (many, format!("cannot read the core dump {name}: it has more than 65534 segments")),
        (odd, format!("cannot read the core dump {name}: its program headers have 57 bytes instead of 56")),
        (elf(2, 4, 4, 10), format!("the core dump {name} has no memory in it")),
    ];
    for (bytes, expected) in cases {
        std::fs::write(&path, bytes).expect("a file");
        let (code, out, err) = bench(&["--memory", name]);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.starts_with(&format!("larder: {expected}")), "{expected}: {err}");
    }
    let missing = folder.path().join("none");
    for (path, expected) in [
        (missing.as_path(), "No such file or directory"),
        (folder.path(), "is not a file: give one that QEMU's pmemsave"),
        (Path::new("/dev/null"), "is not a file: give one that QEMU's pmemsave"),
    ] {
        let name = path.to_str().expect("text");
        let (code, out, err) = bench(&["--memory", name]);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains(name) && err.contains(expected), "{err}");
    }
}

#[test]
fn wrong_option_error_lists_valid_values() {
    for (arguments, expected) in [
        (
            ["--kind", "txt"],
            "[possible values: zeros, filled, text, json, heap, sparse, sequence, counter, code, base64, random, mixed]",
        ),
        (
            ["--method", "lz5"],
            "[possible values: none, uniform, delta, lz4, lz4-fast, words-lz4, zstd-fast, zstd, deflate, igzip, qat, iaa]",
        ),
        (["--batch", "0"], "0 is not in 1..=64"),
        (["--batch", "16,65"], "'65' for '--batch <N,...>': 65 is not in 1..=64"),
        (["--seconds", "0"], "give seconds from 0.001 to 60"),
        (["--seconds", "nan"], "give seconds from 0.001 to 60"),
        (["--seconds", "long"], "give seconds from 0.001 to 60"),
        (["--sample", "1KiB"], "give a size from 4KiB, a page, to 1GiB"),
        (["--sample", "2GiB"], "give a size from 4KiB, a page, to 1GiB"),
        (["--sample", "1GB"], "'GB' in '1GB' is not a unit of size"),
    ] {
        let (code, out, err) = bench(&arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}
