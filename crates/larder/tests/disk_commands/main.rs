//! `larder disk info`, `check`, `tune` and `resize`, with `qemu-img` as the oracle.

#[path = "../support/mod.rs"]
mod support;

mod check;
mod crash;
mod cut;
mod damage;
mod info;
mod made;
mod print;
mod repair;
mod resize;
mod serve;
mod tune;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the program; returns exit status, standard output and standard error.
fn larder(arguments: &[&str], image: &Path) -> (i32, String, String) {
    let output = Command::new(support::larder_path()).args(arguments).arg(image).output().expect("larder starts");
    said(output)
}

fn said(output: Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("it exits"), text(&output.stdout), text(&output.stderr))
}

/// Runs the program with `--output json`.
fn larder_json(arguments: &[&str], image: &Path) -> (i32, Value) {
    let all = [arguments, &["--output", "json"]].concat();
    let (code, out, err) = larder(&all, image);
    let value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    (code, value)
}

/// Runs `qemu-img`; returns the exit status and the output.
fn qemu_img(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new("qemu-img").args(arguments).output();
    said(output.expect("qemu-img starts; testbed/setup.sh installs what the tests need"))
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
