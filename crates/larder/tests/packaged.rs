//! The project's files other than the program: those of the Debian package, which `make package-test` tests in full,
//! and the script that runs the tests.

#[path = "support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};

use support::{larder_path, run_tool, temp_dir_on_disk};

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn sample_is_a_valid_vm_file() {
    let folder = temp_dir_on_disk();
    let image = folder.path().join("web.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
    let sample = std::fs::read_to_string(project().join("packaging/vms/example.toml.sample")).expect("the sample");
    let file = folder.path().join("web.toml");
    // The lines that are commented out are valid, too.
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
    run_tool(text(larder_path()), &["vm", text(&file), "--check"]);
}

/// Output of `cargo test --no-fail-fast` in which a test, a program and an example fail.
const FAILED_RUN: &str = r#"     Running unittests src/lib.rs (target/debug/deps/larder_block-0b1d)
test a::good ... ok
test a::bad ... FAILED

failures:

---- a::bad stdout ----
failures:
    not::a_test
thread 'a::bad' panicked

failures:
    a::bad

test result: FAILED. 1 passed; 1 failed
     Running tests/memory/main.rs (target/debug/deps/memory-77ac)
test result: ok. 1 passed; 0 failed
     Running tests/vm/main.rs (target/debug/deps/vm-1234)
error: test failed, to rerun pass `-p larder --test vm`
Caused by:
  process didn't exit successfully: `/x/vm-1234` (signal: 6, SIGABRT: process abort signal)
   Doc-tests larder_block

failures:
    crates/larder-block/src/units.rs - units::ByteLen (line 12)

test result: FAILED. 0 passed; 1 failed
error: 3 targets failed"#;

#[test]
fn failed_tests_are_named_last() {
    let run = |script: &str| {
        let mut command = std::process::Command::new(project().join("testbed/test.sh"));
        let output = command.args(["sh", "-c", script, "sh", FAILED_RUN]).output();
        let output = output.expect("the script");
        (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"))
    };
    let (code, said) = run("printf '%s\\n' \"$1\"; exit 101");
    assert_eq!(code, Some(101), "{said}");
    let wanted = "\n3 failed:\n    larder_block (unittests src/lib.rs): a::bad\n    vm (tests/vm/main.rs): ended by signal 6, \
                  SIGABRT: process abort signal\n    larder_block (documentation): crates/larder-block/src/units.rs - \
                  units::ByteLen (line 12)\n";
    assert_eq!(said, format!("{FAILED_RUN}\n{wanted}"));
    assert_eq!(run("echo fine"), (Some(0), "fine\n".to_owned()));
}
