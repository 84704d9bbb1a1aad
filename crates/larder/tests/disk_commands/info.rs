//! `larder disk info` reports the same as `qemu-img info`.

use serde_json::Value;

use crate::damage::Bytes;
use crate::made::{KINDS, Made};
use crate::support::{create_image, run_tool, temp_dir_on_tmpfs};
use crate::{larder, larder_json, text_of};

/// Asserts that our report has all of QEMU's fields with the same values; it may have more.
fn assert_within(theirs: &Value, ours: &Value, at: &str) {
    match theirs {
        Value::Object(fields) => {
            for (name, value) in fields {
                // Larder does not support icount; QEMU's children are its own block graph.
                if name != "icount" && name != "children" {
                    assert_within(value, &ours[name], &format!("{at}/{name}"));
                }
            }
        }
        Value::Array(values) => {
            assert_eq!(Some(values.len()), ours.as_array().map(Vec::len), "{at}");
            for (index, value) in values.iter().enumerate() {
                assert_within(value, &ours[index], &format!("{at}/{index}"));
            }
        }
        value => assert_eq!(value, ours, "{at}"),
    }
}

#[test]
fn every_field_matches_qemu() {
    for kind in &KINDS {
        let made = Made::new(kind);
        let theirs = run_tool("qemu-img", &["info", "--output=json", text_of(&made.image)]);
        let theirs: Value = serde_json::from_str(&theirs).expect("JSON");
        let (code, ours) = larder_json(&["disk", "info"], &made.image);
        assert_eq!(code, 0);
        assert_within(&theirs, &ours, kind.name);
        if kind.snapshots {
            assert_eq!(ours["snapshots"][0]["disk-size"], ours["virtual-size"], "{}", kind.name);
        }
    }
}

#[test]
fn raw_image_size_matches_qemu() {
    let folder = temp_dir_on_tmpfs();
    let raw = create_image(folder.path(), 3 << 20);
    let theirs = run_tool("qemu-img", &["info", "--output=json", "-f", "raw", text_of(&raw)]);
    let (code, ours) = larder_json(&["disk", "info"], &raw);
    assert_eq!(code, 0);
    assert_within(&serde_json::from_str(&theirs).expect("JSON"), &ours, "raw");
    let (_, words, _) = larder(&["disk", "info"], &raw);
    assert!(words.contains("format:           raw\n"), "{words}");
    assert!(words.contains("virtual size:     3 MiB (3145728 bytes)\n"), "{words}");
}

#[test]
fn image_in_use_is_reported_undisturbed() {
    let made = Made::new(&KINDS[0]);
    let (_, before) = larder_json(&["disk", "info"], &made.image);
    assert_eq!(before["in-use"], Value::Bool(false));
    let (holder, _) = made.serve_by_qemu("qcow2");
    let (code, ours) = larder_json(&["disk", "info"], &made.image);
    assert_eq!((code, &ours["in-use"]), (0, &Value::Bool(true)), "{ours:#}");
    assert_eq!(ours["snapshots"], before["snapshots"]);
    let (_, words, _) = larder(&["disk", "info"], &made.image);
    let expected = format!("in use:           yes, by qemu-nbd, pid {};", holder.id());
    assert!(words.contains(&expected), "{words}");
}

#[test]
fn chain_is_shown_despite_missing_link() {
    let folder = temp_dir_on_tmpfs();
    let path = |name: &str| folder.path().join(name);
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text_of(&path("base.qcow2")), "64M"]);
    for (name, below) in [("middle.qcow2", "base.qcow2"), ("top.qcow2", "middle.qcow2")] {
        let new = path(name);
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", text_of(&new)]);
    }
    let (code, ours) = larder_json(&["disk", "info", "--backing-chain"], &path("top.qcow2"));
    assert_eq!(code, 0);
    let chain = ours["backing-chain"].as_array().expect("a chain");
    assert_eq!(chain.len(), 2, "{ours:#}");
    assert_eq!(chain[1]["filename"], text_of(&path("base.qcow2")));
    assert_eq!(chain[1]["virtual-size"], 64 << 20);
    std::fs::remove_file(path("base.qcow2")).expect("removed");
    let (code, words, _) = larder(&["disk", "info", "--backing-chain"], &path("top.qcow2"));
    assert_eq!(code, 0);
    let expected = format!("{} (qcow2): cannot be read: cannot open", text_of(&path("base.qcow2")));
    assert!(words.contains(&expected), "{words}");
}

#[test]
fn cyclic_chain_is_shown_once() {
    let folder = temp_dir_on_tmpfs();
    let [one, other] = ["one.qcow2", "other.qcow2"].map(|name| folder.path().join(name));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text_of(&other), "64M"]);
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "other.qcow2", "-F", "qcow2", text_of(&one)]);
    run_tool("qemu-img", &["rebase", "-u", "-b", "one.qcow2", "-F", "qcow2", text_of(&other)]);
    let (code, words, _) = larder(&["disk", "info", "--backing-chain"], &one);
    assert_eq!(code, 0);
    let rows: Vec<&str> = words.lines().filter(|line| line.starts_with("  ")).collect();
    let expected = format!("  {} (qcow2): 64 MiB", text_of(&other));
    assert_eq!((rows.len(), rows[0]), (2, &*expected), "{words}");
    assert!(rows[1].contains("already in this chain, which is a cycle"), "{words}");
}

#[test]
fn image_shorter_than_header_is_reported() {
    let made = Made::new(&KINDS[0]);
    let mut bytes = Bytes::of(&made.image);
    bytes.0.truncate(100);
    bytes.put(&made.image);
    for command in ["info", "check", "tune"] {
        let (code, _, err) = larder(&["disk", command], &made.image);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("the file has 100 bytes, but a qcow2 header alone has"), "{err}");
    }
}

#[test]
fn dirty_and_corrupt_bits_are_reported() {
    let made = Made::new(&KINDS[0]);
    let mut bytes = Bytes::of(&made.image);
    bytes.set(72, bytes.u64(72) | 3);
    bytes.put(&made.image);
    let (code, ours) = larder_json(&["disk", "info"], &made.image);
    assert_eq!(code, 0);
    assert_eq!(ours["dirty-flag"], Value::Bool(true));
    assert_eq!(ours["format-specific"]["data"]["corrupt"], Value::Bool(true));
}

#[test]
fn image_on_nbd_server_is_read() {
    let made = Made::new(&KINDS[0]);
    let (_server, uri) = made.serve_by_qemu("raw");
    let (code, ours) = larder_json(&["disk", "info", "--format", "qcow2"], uri.as_ref());
    assert_eq!((code, &ours["virtual-size"]), (0, &(24 << 20).into()), "{ours:#}");
    assert_eq!(ours["snapshots"][0]["name"], "before lunch");
    let (code, words, _) = larder(&["disk", "info"], uri.as_ref());
    assert_eq!(code, 0);
    assert!(words.contains("begins like a qcow2 image; if it is one, give --format qcow2"), "{words}");
    let (code, _) = larder_json(&["disk", "check", "--format", "qcow2"], uri.as_ref());
    assert_eq!(code, 0);
}

/// Names from other programs, with terminal control sequences and line breaks in them, are escaped in the text, each
/// on its line; the JSON has them unchanged.
#[test]
fn control_characters_in_names_are_escaped() {
    const NAME: &str = "a\u{1b}[2J\nb\r\u{7f}";
    const SHOWN: &str = r"a\u001b[2J\u000ab\u000d\u007f";
    let folder = temp_dir_on_tmpfs();
    let (backing, top) = (folder.path().join(NAME), folder.path().join("top.qcow2"));
    run_tool("qemu-img", &["create", "-q", "-f", "raw", text_of(&backing), "1M"]);
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text_of(&backing), text_of(&top)]);
    run_tool("qemu-img", &["snapshot", "-c", NAME, text_of(&top)]);
    run_tool("qemu-img", &["bitmap", "--add", text_of(&top), NAME]);
    let (code, value) = larder_json(&["disk", "info", "--backing-chain"], &top);
    assert_eq!(code, 0);
    assert_eq!(value["backing-filename"], text_of(&backing));
    assert_eq!(value["snapshots"][0]["name"], NAME);
    assert_eq!(value["format-specific"]["data"]["bitmaps"][0]["name"], NAME);
    let is_plain = |text: &str| text.chars().all(|letter| letter == '\n' || !letter.is_control());
    let (code, words, _) = larder(&["disk", "info", "--backing-chain"], &top);
    assert!(code == 0 && is_plain(&words), "{words:?}");
    assert_eq!(words.matches(SHOWN).count(), 4, "file, chain, snapshot and bitmap: {words}");
    let (code, words, _) = larder(&["disk", "check"], &top);
    assert!(code == 0 && is_plain(&words), "{words:?}");
    std::fs::remove_file(&backing).expect("is removed");
    let (code, words, errors) = larder(&["disk", "info", "--backing-chain"], &top);
    assert!(code == 0 && is_plain(&words), "{words:?}");
    assert!(is_plain(&errors), "{errors:?}");
}
