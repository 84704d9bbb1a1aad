//! `larder bench policy`.

#[path = "support/mod.rs"]
mod support;

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Runs the command; returns exit status, standard output and standard error.
fn bench(arguments: &[&str], trace: &Path) -> (i32, String, String) {
    let mut command = Command::new(support::larder_path());
    let output = command.args(["bench", "policy"]).args(arguments).arg(trace).output();
    let output = output.expect("larder starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("it exits"), text(&output.stdout), text(&output.stderr))
}

/// Returns a trace of 2,000 blocks, each read ten times, in requests of four blocks and of one block.
fn loop_trace() -> String {
    let mut text = String::new();
    for round in 0..10 {
        for block in (0..2_000).step_by(10) {
            writeln!(text, "{block} 4 0 {round}").expect("text");
            (4..10).for_each(|next| writeln!(text, "{} 1 0 {round}", block + next).expect("text"));
        }
    }
    text
}

fn result<'a>(size: &'a Value, policy: &str) -> &'a Value {
    let results = size["results"].as_array().expect("results");
    let found = results.iter().find(|result| result["policy"] == policy);
    found.unwrap_or_else(|| panic!("{policy} is in {size}"))
}

/// Larder's policy keeps part of a loop that is larger than the cache, where LRU has no hits.
#[test]
fn loop_hits_where_lru_thrashes() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("loop.lis");
    std::fs::write(&path, loop_trace()).expect("a trace");
    let (code, out, err) = bench(&["--sizes", "50,100", "--output", "json"], &path);
    assert_eq!((code, err.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let trace = &report["traces"][0];
    assert_eq!(trace["name"], "loop.lis");
    assert_eq!(trace["accesses"], 20_000);
    assert_eq!(trace["footprint-bytes"], 2_000 * 4096);
    let [half, whole] = trace["sizes"].as_array().expect("sizes").as_slice() else {
        panic!("two sizes: {trace}");
    };
    assert_eq!(half["bytes"], 1_000 * 4096);
    assert_eq!(result(half, "LRU")["hits"], 0);
    assert_eq!(result(half, "LRU")["written-bytes"], 20_000 * 4096);
    // The optimum: 9 of 10 reads of half of the lines hit.
    let best = 9_000;
    let hits = result(half, "Larder")["hits"].as_u64().expect("a number");
    assert!((best / 2..=best).contains(&hits), "{hits} hits");
    for policy in ["LRU", "SIEVE", "S3-FIFO", "ARC"] {
        assert_eq!(result(whole, policy)["hits"], 18_000, "{policy}");
    }
    // The curve shows from which size an LRU cache has hits.
    let curve = trace["miss-ratio-curve"].as_array().expect("points");
    let last = curve.last().expect("a point");
    assert!((last["miss-percent"].as_f64().expect("a number") - 10.0).abs() < 1e-6, "{last}");
}

#[test]
fn text_output_has_tables() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("loop.lis");
    std::fs::write(&path, loop_trace()).expect("a trace");
    let (code, out, err) = bench(&["--sizes", "50"], &path);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("loop.lis: 20000 accesses (0.0 % writes) to 2000 lines of 4 KiB\n"), "{out}");
    for part in ["hits, %", "written to the SSD", "CPU ns per access", "  W-TinyLFU", "misses of an LRU cache"] {
        assert!(out.contains(part), "{part}: {out}");
    }
}

#[test]
fn invalid_trace_is_refused() {
    let folder = support::temp_dir_on_tmpfs();
    let path = folder.path().join("trace");
    let cases: [(&[u8], &[&str], &str); 5] = [
        (b"", &[], "trace has no requests"),
        (b"what?", &[], "is not in a known trace format"),
        (b"1 1 0 0\n1 1 0\n", &[], "is damaged: line 2 is not four numbers: '1 1 0'"),
        (b"1 1 0 0\n", &["--budget", "1GiB"], "have no timestamps"),
        (b"1 1 0 0\n", &["--line", "5000"], "give a power of two"),
    ];
    for (bytes, arguments, expected) in cases {
        std::fs::write(&path, bytes).expect("a file");
        let (code, out, err) = bench(arguments, &path);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(expected), "{err}");
    }
    let (code, _, err) = bench(&[], &folder.path().join("none"));
    assert_eq!(code, 2);
    assert!(err.contains("cannot read the trace") && err.contains("none"), "{err}");
}
