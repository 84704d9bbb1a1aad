//! `larder disk check` finds the errors that `qemu-img check` finds.

use std::path::Path;

use serde_json::Value;

use crate::damage::{Bytes, DAMAGES, metadata};
use crate::made::{KINDS, Made};
use crate::support::create_image;
use crate::{larder, larder_json, qemu_img, text_of};

/// Returns QEMU's report about an image; `None` if it fails.
pub(crate) fn qemu_check(image: &Path) -> Option<Value> {
    let (code, out, _) = qemu_img(&["check", "-f", "qcow2", "--output=json", text_of(image)]);
    matches!(code, 0 | 2 | 3).then(|| serde_json::from_str(&out).expect("JSON"))
}

pub(crate) fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or(0)
}

fn assert_same(ours: &Value, theirs: &Value, fields: &[&str], what: &str) {
    for field in fields {
        assert_eq!(number(ours, field), number(theirs, field), "{field} of {what}: {ours:#} but QEMU {theirs:#}");
    }
}

/// For each kind of image and damage, the check agrees with `qemu-img check`.
#[test]
fn verdicts_match_qemu() {
    for kind in &KINDS {
        let made = Made::new(kind);
        let sound = Bytes::of(&made.image);
        for damage in DAMAGES.iter().filter(|damage| (damage.fits)(kind)) {
            let what = format!("{}: {}", kind.name, damage.name);
            let mut bytes = Bytes(sound.0.clone());
            (damage.apply)(&mut bytes);
            bytes.put(&made.image);
            let (code, ours) = larder_json(&["disk", "check"], &made.image);
            assert_eq!(Bytes::of(&made.image).0, bytes.0, "{what}: a check changed the image");
            let Some(theirs) = qemu_check(&made.image) else {
                assert_eq!(code, 1, "{what}: QEMU cannot check it, but we find nothing");
                continue;
            };
            let is_bad = |report: &Value| {
                number(report, "corruptions") + number(report, "leaks") + number(report, "check-errors") > 0
            };
            assert_eq!(is_bad(&ours), is_bad(&theirs), "{what}: {ours:#} but QEMU {theirs:#}");
            let marked = damage.name.starts_with("marked");
            assert_eq!(code, i32::from(is_bad(&ours) || marked), "{what}");
            if damage.counted {
                let fields = ["corruptions", "leaks", "image-end-offset"];
                assert_same(&ours, &theirs, &fields, &what);
                let fields = ["total-clusters", "allocated-clusters", "fragmented-clusters", "compressed-clusters"];
                assert_same(&ours, &theirs, &fields, &what);
            }
        }
    }
}

/// A check of a randomly damaged image ends, and finds an error if QEMU does.
#[test]
fn random_damage_is_found_like_qemu() {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for kind in &KINDS {
        let made = Made::new(kind);
        let sound = Bytes::of(&made.image);
        let places = metadata(&sound);
        for round in 0..12 {
            let mut bytes = Bytes(sound.0.clone());
            for _ in 0..=random(6) {
                let (at, len) = places[random(places.len() as u64) as usize];
                let byte = (at + random(len)) as usize;
                bytes.0[byte] ^= 1 << random(8);
            }
            bytes.put(&made.image);
            let what = format!("{}, round {round}", kind.name);
            let (code, ours) = larder_json(&["disk", "check"], &made.image);
            if let Some(theirs) = qemu_check(&made.image) {
                let bad = |report: &Value| number(report, "corruptions") + number(report, "check-errors") > 0;
                assert_eq!(bad(&ours), bad(&theirs), "{what}: {ours:#} but QEMU {theirs:#}");
            }
            let (repaired, after) = larder_json(&["disk", "check", "--repair"], &made.image);
            assert!(repaired <= code, "{what}: {after:#}");
            if repaired == 0 {
                let (qemu, said, errors) = qemu_img(&["check", "-f", "qcow2", text_of(&made.image)]);
                assert_eq!(qemu, 0, "{what}: {said} {errors}");
            }
        }
    }
}

#[test]
fn text_names_errors_and_next_steps() {
    let made = Made::new(&KINDS[0]);
    let (code, out, _) = larder(&["disk", "check"], &made.image);
    assert_eq!(code, 0, "{out}");
    assert!(out.starts_with("no errors, no leaks\n"), "{out}");
    let mut bytes = Bytes::of(&made.image);
    let leaked = bytes.append();
    bytes.set_refcount(leaked, 1);
    bytes.put(&made.image);
    let (code, out, _) = larder(&["disk", "check"], &made.image);
    assert_eq!(code, 1, "{out}");
    let expected = format!("leak: cluster {} at {leaked:#x}: refcount 1, references 0\n", leaked / bytes.cluster());
    assert!(out.contains(&expected), "{out}");
    assert!(out.contains("found: 0 errors, 1 leaked cluster; `larder disk check --repair`"), "{out}");
}

#[test]
fn format_option_cannot_make_raw_qcow2() {
    let folder = crate::support::temp_dir_on_tmpfs();
    let raw = create_image(folder.path(), 1 << 20);
    for command in ["info", "check", "tune"] {
        let (code, _, err) = larder(&["disk", command, "--format", "qcow2"], &raw);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("it is not a qcow2 image; without --format"), "{command}: {err}");
    }
}

#[test]
fn checking_raw_image_is_an_error() {
    let folder = crate::support::temp_dir_on_tmpfs();
    let raw = create_image(folder.path(), 1 << 20);
    let (code, _, err) = larder(&["disk", "check"], &raw);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("is a raw image: it has no metadata that could be checked"), "{err}");
}

#[test]
fn check_beyond_memory_limit_is_refused() {
    let made = Made::new(&KINDS[2]);
    let (code, _, err) = larder(&["disk", "check", "--memory", "16KiB"], &made.image);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("may take 1 MiB, more than the 0 MiB allowed"), "{err}");
}
