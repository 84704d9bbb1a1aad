//! Truncated images: `larder disk check --repair` repairs them without placing anything where data was lost, or
//! leaves them unchanged.

use std::path::Path;

use crate::check::number;
use crate::damage::{Bytes, places};
use crate::made::{KINDS, Kind, Made};
use crate::support::run_tool;
use crate::{larder, larder_json, qemu_img, text_of};

/// Kinds of small images that have their tables in many places.
const SMALL_CLUSTERS: Kind = Kind {
    name: "smallest clusters",
    options: "cluster_size=512",
    snapshots: false,
    compressed: false,
    bitmap: false,
    backing: true,
};
const NARROW: Kind =
    Kind { name: "refcounts of one bit", options: "cluster_size=2k,refcount_bits=1", ..SMALL_CLUSTERS };

/// Returns offsets at which the image is truncated: at the start, within and at the end of known structures, some
/// sixty of them, and some random ones.
fn cuts(sound: &Bytes) -> Vec<u64> {
    let places = places(sound);
    let step = places.len().div_ceil(10);
    let chosen = places.iter().take(4).chain(places.iter().skip(4).step_by(step));
    let around = chosen.flat_map(|(at, len)| [0, 1, len / 2, len / 2 + 3, len - 1, *len].map(|by| at + by));
    let anywhere = (1..10).map(|tenth| sound.len() * tenth / 10 + tenth);
    let mut cuts: Vec<u64> = around.chain(anywhere).filter(|cut| (1..sound.len()).contains(cut)).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

fn is_same(one: &Path, other: &Path) -> bool {
    qemu_img(&["compare", "-f", "raw", "-F", "raw", text_of(one), text_of(other)]).0 == 0
}

#[test]
fn truncated_image_is_repaired_or_unchanged() {
    for kind in [&KINDS[0], &KINDS[1], &KINDS[4], &SMALL_CLUSTERS, &NARROW] {
        let made = Made::new(kind);
        let sound = Bytes::of(&made.image);
        let original = made.content("original.raw").expect("a sound image");
        let mut mended = 0;
        for cut in cuts(&sound) {
            let what = format!("{} cut off at {cut:#x}", kind.name);
            let bytes = Bytes(sound.0[..cut as usize].to_vec());
            bytes.put(&made.image);
            let before = made.content("before.raw");
            let (_, info, _) = larder(&["disk", "info"], &made.image);
            let (code, ours) = larder_json(&["disk", "check", "--repair"], &made.image);
            if code == 0 {
                mended += 1;
                is_mended(&made, &what, before.as_deref(), &original, number(&ours, "dropped-count"));
                continue;
            }
            assert_eq!(code, 1, "{what}: {ours:#}");
            assert!(Bytes::of(&made.image).0 == bytes.0, "{what}: it was changed: {ours:#}");
            assert!(info.contains("state:            truncated"), "{what}: {info}");
            let (_, said, _) = larder(&["disk", "check", "--repair"], &made.image);
            assert!(said.contains("nothing was changed"), "{what}: {said}");
        }
        assert!(mended > 0, "{}", kind.name);
    }
}

/// Checks a repaired image: QEMU finds no errors and reads what it read before, and all differences from the whole
/// image were reported as lost.
fn is_mended(made: &Made, what: &str, before: Option<&Path>, original: &Path, dropped: u64) {
    run_tool("qemu-img", &["check", "-f", "qcow2", text_of(&made.image)]);
    let after = made.content("after.raw").expect("QEMU reads what was mended");
    match before {
        Some(before) => assert!(is_same(before, &after), "{what}: it reads otherwise than before"),
        None => assert!(dropped > 0, "{what}: QEMU could not read all of it"),
    }
    assert!(dropped > 0 || is_same(original, &after), "{what}: something is lost without a word");
    let (code, said, _) = larder(&["disk", "check"], &made.image);
    assert_eq!(code, 0, "{what}: {said}");
    let (_, info, _) = larder(&["disk", "info"], &made.image);
    assert!(info.contains("state:            clean\n"), "{what}: {info}");
}

/// Rebuilt refcounts are not placed where the header claimed the old ones to be.
#[test]
fn refcounts_avoid_claimed_locations() {
    let made = Made::new(&NARROW);
    let expected = made.content("expected.raw").expect("a sound image");
    let mut bytes = Bytes::of(&made.image);
    let end = bytes.len().next_multiple_of(bytes.cluster());
    // Past the end of the file: a refcount block, and right after it the table.
    bytes.set(bytes.refcount_table(), end);
    bytes.set(48, end + bytes.cluster());
    bytes.put(&made.image);
    let (code, ours) = larder_json(&["disk", "check", "--repair"], &made.image);
    assert_eq!((code, &ours["refcounts-rebuilt"]), (0, &true.into()), "{ours:#}");
    let table = Bytes::of(&made.image).refcount_table();
    assert!(table > end + bytes.cluster(), "{table:#x} is not behind {end:#x}");
    is_mended(&made, "no refcounts", Some(&expected), &expected, 0);
}
