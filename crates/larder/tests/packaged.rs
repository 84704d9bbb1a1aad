//! What the Debian package has besides the program; `make package-test` tries all of it.

#[path = "support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};

use support::{larder, on_disk, tool};

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn the_sample_becomes_the_file_of_a_vm() {
    let folder = on_disk();
    let image = folder.path().join("web.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
    let sample = std::fs::read_to_string(project().join("packaging/vms/example.toml.sample")).expect("the sample");
    let file = folder.path().join("web.toml");
    // What is commented out is right, too.
    let said = sample
        .replace("\n#cache", "\ncache")
        .replace("\n#socket", "\nsocket")
        .replace("\n#[memory]\n#budget", "\n[memory]\nbudget")
        .replace("\n#swap", "\nswap")
        .replace("\n#pid-file", "\npid-file")
        .replace("8GiB", "20MiB")
        .replace("\"kvm\"", "\"root\"")
        .replace("/srv", text(folder.path()))
        .replace("/ssd", text(folder.path()))
        .replace("20GiB", "20MiB");
    std::fs::write(&file, said).expect("writes the file");
    tool(text(larder()), &["vm", text(&file), "--check"]);
}
