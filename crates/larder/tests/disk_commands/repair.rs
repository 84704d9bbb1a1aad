//! `larder disk check --repair` repairs what can be repaired, and loses nothing that can be read.

use crate::check::{number, qemu_check};
use crate::damage::{Bytes, COPIED, DAMAGES};
use crate::made::{KINDS, Made};
use serde_json::Value;

use crate::support::run_tool;
use crate::{larder, larder_json, qemu_img, text_of};

/// After a repair QEMU finds no errors, and reads the same data as before.
#[test]
fn repaired_image_satisfies_qemu() {
    for kind in &KINDS {
        let made = Made::new(kind);
        let sound = Bytes::of(&made.image);
        let original = made.content("original.raw").expect("a sound image");
        for damage in DAMAGES.iter().filter(|damage| (damage.fits)(kind)) {
            let what = format!("{}: {}", kind.name, damage.name);
            let mut bytes = Bytes(sound.0.clone());
            (damage.apply)(&mut bytes);
            bytes.put(&made.image);
            let damaged = made.content("damaged.raw");
            let (code, ours) = larder_json(&["disk", "check", "--repair"], &made.image);
            if code == 1 && !damage.mendable {
                continue;
            }
            assert_eq!(code, 0, "{what}: {ours:#}");
            let (qemu, said, errors) = qemu_img(&["check", "-f", "qcow2", text_of(&made.image)]);
            assert_eq!(qemu, 0, "{what}: {said} {errors}");
            let dropped = number(&ours, "dropped-count") > 0;
            // Data that QEMU cannot read from the damaged image (a missing compressed cluster) was dropped.
            let lost = dropped && damaged.is_none();
            let expected = damaged.unwrap_or_else(|| original.clone());
            let compare = ["compare", "-f", "raw", "-F", "qcow2", text_of(&expected), text_of(&made.image)];
            let (qemu, said, errors) = qemu_img(&compare);
            assert!(qemu == 0 || lost, "{what}: {said} {errors} {ours:#}");
            let (code, again) = larder_json(&["disk", "check", "--repair"], &made.image);
            assert_eq!((code, number(&again, "corruptions-fixed")), (0, 0), "{what}");
        }
    }
}

/// Returns an image, and its bytes with damage that cannot be repaired.
fn unaligned() -> (Made, Bytes) {
    let made = Made::new(&KINDS[0]);
    let damage = DAMAGES.iter().find(|damage| damage.name == "an L2 table that is not aligned");
    let mut bytes = Bytes::of(&made.image);
    (damage.expect("it is there").apply)(&mut bytes);
    (made, bytes)
}

/// Clusters that may belong to an entry that cannot be repaired are not freed as leaks.
#[test]
fn clusters_behind_unrepairable_entry_are_kept() {
    let (made, bytes) = unaligned();
    bytes.put(&made.image);
    let (_, before) = larder_json(&["disk", "check"], &made.image);
    assert!(number(&before, "leaks") > 0, "{before:#}");
    let (code, after) = larder_json(&["disk", "check", "--repair"], &made.image);
    assert_eq!(code, 1);
    assert!(number(&after, "leaks") >= number(&before, "leaks"), "{before:#} {after:#}");
    let (code, text, _) = larder(&["disk", "check", "--repair"], &made.image);
    assert_eq!(code, 1);
    assert!(text.contains("cannot be repaired"), "{text}");
}

#[test]
fn repaired_and_remaining_errors_listed_once() {
    let (made, mut bytes) = unaligned();
    bytes.set_refcount(0, 0);
    bytes.put(&made.image);
    let (code, text, _) = larder(&["disk", "check", "--repair"], &made.image);
    assert_eq!(code, 1, "{text}");
    let mut lines: Vec<&str> = text.lines().collect();
    let mended = lines.iter().position(|line| line.starts_with("error: cluster 0 at 0x0: refcount 0"));
    let repaired = lines.iter().position(|line| line.starts_with("repaired: 1 error"));
    let left = lines.iter().position(|line| *line == "remaining:");
    let aligned = lines.iter().position(|line| line.contains("not aligned"));
    assert!(mended.is_some() && aligned.is_some(), "{text}");
    assert!(mended < repaired && repaired < left && left < aligned, "{text}");
    let count = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), count, "{text}");
}

/// Tables that overlap are not changed, and no repair is advised.
#[test]
fn overlapping_tables_are_left_alone() {
    let made = Made::new(&KINDS[0]);
    let sound = Bytes::of(&made.image);
    for (field, place) in [(40, sound.refcount_table()), (48, sound.l1()), (40, 0)] {
        let mut bytes = Bytes(sound.0.clone());
        bytes.set(field, place);
        bytes.put(&made.image);
        let (code, text, _) = larder(&["disk", "check"], &made.image);
        assert_eq!(code, 1, "{text}");
        assert!(text.contains(" overlap: ") && text.contains("--salvage"), "{text}");
        assert!(!text.contains("--repair"), "{text}");
        let (code, text, err) = larder(&["disk", "check", "--repair"], &made.image);
        assert_eq!(code, 1, "{text} {err}");
        assert!(text.contains("nothing was changed"), "{text}");
        assert!(bytes.0 == Bytes::of(&made.image).0);
    }
}

/// A table pointer into guest data does not lead a repair to change that data.
#[test]
fn guest_data_is_never_repaired() {
    let made = Made::new(&KINDS[0]);
    let expected = made.content("expected.raw").expect("a sound image");
    let mut bytes = Bytes::of(&made.image);
    // The L1 entry of the snapshot points to a data cluster of the active disk.
    let data = bytes.u64(bytes.l2_entry(20 << 20)) & !COPIED;
    let snapshot_l1 = bytes.u64(bytes.u64(64));
    bytes.set(snapshot_l1, data);
    bytes.put(&made.image);
    let (code, ours) = larder_json(&["disk", "check", "--repair"], &made.image);
    assert_eq!(code, 1, "{ours:#}");
    let arguments = ["compare", "-f", "raw", "-F", "qcow2"];
    run_tool("qemu-img", &[&arguments[..], &[text_of(&expected), text_of(&made.image)]].concat());
}

#[test]
fn leaks_option_repairs_only_leaks() {
    let made = Made::new(&KINDS[0]);
    let sound = Bytes::of(&made.image);
    let mut bytes = Bytes(sound.0.clone());
    let at = bytes.append();
    bytes.set_refcount(at, 1);
    bytes.put(&made.image);
    let (code, ours) = larder_json(&["disk", "check", "--repair=leaks"], &made.image);
    assert_eq!((code, number(&ours, "leaks-fixed")), (0, 1), "{ours:#}");

    let flag = DAMAGES.iter().find(|damage| damage.name == "a refcount of 0");
    (flag.expect("it is there").apply)(&mut bytes);
    bytes.put(&made.image);
    let (code, ours) = larder_json(&["disk", "check", "--repair=leaks"], &made.image);
    assert_eq!((code, number(&ours, "leaks-fixed")), (1, 1), "{ours:#}");
    assert!(number(&ours, "corruptions") > 0, "{ours:#}");
}

/// Returns the autoclear bits that a server leaves if it was killed since the host started.
fn session_of_this_boot() -> u64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("procfs");
    let end = u64::from_str_radix(&id.trim()[32..], 16).expect("a UUID");
    end << 48 | 1 << 32
}

/// An image whose server was killed is not repaired before its journal was applied.
#[test]
fn killed_servers_image_needs_its_journal() {
    let made = Made::new(&KINDS[0]);
    let mut bytes = Bytes::of(&made.image);
    let at = bytes.append();
    bytes.set_refcount(at, 1);
    bytes.set(88, bytes.u64(88) | session_of_this_boot());
    bytes.put(&made.image);
    for options in [&["disk", "check", "--repair"][..], &["disk", "check", "--repair=leaks"]] {
        let (code, _, err) = larder(options, &made.image);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("is not to be found") && err.contains("--discard-journal"), "{err}");
        assert!(bytes.0 == Bytes::of(&made.image).0);
    }
    let (_, out, err) = larder(&["disk", "check"], &made.image);
    assert!(out.contains("journal: a server of it was killed"), "{out} {err}");
    assert!(bytes.0 == Bytes::of(&made.image).0);
    let (code, ours) = larder_json(&["disk", "check", "--repair", "--discard-journal"], &made.image);
    assert_eq!((code, number(&ours, "leaks-fixed"), &ours["journal"]), (0, 1, &Value::Null), "{ours:#}");
}

#[test]
fn image_in_use_is_not_repaired() {
    let made = Made::new(&KINDS[0]);
    let (_holder, _) = made.serve_by_qemu("qcow2");
    let (code, _, err) = larder(&["disk", "check", "--repair"], &made.image);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("in use by another process"), "{err}");
}

#[test]
fn block_device_repair_stays_in_bounds() {
    let made = Made::new(&KINDS[0]);
    let mut bytes = Bytes::of(&made.image);
    // The refcounts have to be rebuilt within the device.
    let end = bytes.len().next_multiple_of(bytes.cluster());
    bytes.0.resize((end + (1 << 20)) as usize, 0);
    bytes.set(bytes.refcount_table(), 0);
    bytes.put(&made.image);
    let expected = made.content("expected.raw").expect("QEMU reads it");
    let device = crate::support::LoopDevice::new(&made.image, 512);
    let arguments = ["disk", "check", "--repair", "--format", "qcow2"];
    let (code, ours) = larder_json(&arguments, &device.0);
    assert_eq!((code, &ours["refcounts-rebuilt"]), (0, &true.into()), "{ours:#}");
    drop(device);
    let theirs = qemu_check(&made.image).expect("QEMU checks it");
    assert_eq!(number(&theirs, "corruptions") + number(&theirs, "leaks"), 0, "{theirs:#}");
    run_tool("qemu-img", &["compare", text_of(&expected), text_of(&made.image)]);
}
