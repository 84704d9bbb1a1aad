//! `larder disk tune` agrees with measurements that were published for some sizes.

use serde_json::Value;

use crate::support::{create_image, run_tool, temp_dir_on_tmpfs};
use crate::{larder, larder_json, text_of};

/// Returns the JSON and the text for a new image.
fn tune(size: &str, cluster: &str) -> (Value, String) {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    let options = format!("cluster_size={cluster}");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text_of(&path), size]);
    let (code, ours) = larder_json(&["disk", "tune"], &path);
    let (code_text, words, _) = larder(&["disk", "tune"], &path);
    assert_eq!((code, code_text), (0, 0), "{words}");
    (ours, words)
}

fn assert_old_default(size: &str, cluster: &str, thrashes: bool) {
    let (ours, words) = tune(size, cluster);
    assert_eq!(ours["qemu-before-3.1"]["thrashes"], Value::Bool(thrashes), "{ours:#}");
    let line = words.lines().find(|line| line.starts_with("QEMU before 3.1:"));
    let line = line.expect("a line about it");
    assert_eq!(line.contains("evict its entries"), thrashes, "{line}");
    assert_eq!(line.contains("covers the whole disk: fine"), !thrashes, "{line}");
}

#[test]
fn disk_100g_clusters_256k_thrashes() {
    assert_old_default("100G", "256k", true);
}

#[test]
fn disk_100g_clusters_512k_is_fine() {
    assert_old_default("100G", "512k", false);
}

#[test]
fn disk_1t_clusters_512k_thrashes() {
    assert_old_default("1T", "512k", true);
}

#[test]
fn disk_1t_clusters_1m_is_fine() {
    assert_old_default("1T", "1M", false);
}

#[test]
fn disk_1t_clusters_2m_is_fine() {
    assert_old_default("1T", "2M", false);
}

/// The advised options for QEMU and libvirt can be pasted as they are.
#[test]
fn advised_options_can_be_pasted() {
    let (ours, words) = tune("1T", "64k");
    assert_eq!(ours["qemu-today"]["thrashes"], Value::Bool(true));
    assert_eq!(ours["l2-cache-size"], 128 << 20);
    assert!(words.contains("l2-cache-size=134217728\n"), "{words}");
    // libvirt's size covers L2 tables and refcounts; QEMU first reserves 4 clusters of it for refcounts.
    let element = "<metadata_cache><max_size unit='bytes'>134479872</max_size></metadata_cache>";
    assert!(words.contains(element), "{words}");
    assert_eq!(ours["new-image-cluster-size"], 256 << 10);
    // QEMU accepts the advised size.
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text_of(&path), "1T"]);
    let options = format!("driver=qcow2,l2-cache-size=134217728,file.filename={}", path.display());
    run_tool("qemu-io", &["--image-opts", &options, "-c", "read 0 512"]);
}

#[test]
fn larders_map_size_is_measured() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    let options = "preallocation=metadata";
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, text_of(&path), "64G"]);
    let (_, ours) = larder_json(&["disk", "tune"], &path);
    let (measured, contiguous) = (&ours["larder"]["measured"], &ours["larder"]["contiguous"]);
    let (measured, contiguous) = (measured.as_u64().expect("measured"), contiguous.as_u64().expect("told"));
    // 0.8 MiB per TiB; QEMU's L2 tables between the clusters add a little.
    assert!((50 << 10..110 << 10).contains(&measured), "{measured}");
    assert!(contiguous.abs_diff((64 << 30) / (1 << 20) * 8 / 10) < 2048, "{contiguous}");
}

#[test]
fn small_disk_needs_no_settings() {
    let (ours, words) = tune("1M", "64k");
    assert_eq!(ours["qemu-today"]["thrashes"], Value::Bool(false));
    assert!(words.contains("16 clusters, 1 L2 table of 64 KiB"), "{words}");
    assert!(words.contains("in each VM's QEMU: it uses that by default\n"), "{words}");
    assert!(!words.contains("l2-cache-size"), "{words}");
}

#[test]
fn worst_case_memory_is_bounded() {
    let (ours, words) = tune("16T", "64k");
    assert!(words.contains("not even of 2 MiB (QEMU today; a larger cache covers it)"), "{words}");
    assert!(words.contains("256 MiB at worst, instead of 1.26 GiB, because of --metadata-memory\n"), "{words}");
    assert_eq!(ours["larder"]["most"], 256 << 20);
}

#[test]
fn old_qemu_cannot_open_new_features() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    let options = "extended_l2=on,cluster_size=128k";
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, text_of(&path), "1T"]);
    let (_, ours) = larder_json(&["disk", "tune"], &path);
    let (_, words, _) = larder(&["disk", "tune"], &path);
    assert!(words.contains("QEMU before 3.1:    cannot open it\n"), "{words}");
    assert_eq!(ours["qemu-before-3.1"], Value::Null, "{ours:#}");
    // 16 bytes per cluster where subclusters are allocated individually.
    assert!(ours["larder"]["worst"].as_u64() > Some((1 << 40) / (128 << 10) * 16), "{ours:#}");
}

#[test]
fn raw_image_needs_no_tuning() {
    let folder = temp_dir_on_tmpfs();
    let raw = create_image(folder.path(), 1 << 20);
    let (code, words, _) = larder(&["disk", "tune"], &raw);
    assert_eq!(code, 0);
    assert!(words.contains("nothing to tune"), "{words}");
}
