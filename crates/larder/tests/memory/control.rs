//! The control socket of the pager, with curl as the client.

use crate::support::run_tool;
use crate::{Fixture, MIB};

const GET: &str = "http://x/v1/memory";
const DETACH: &str = "http://x/v1/memory/detach";

/// Sends a request to the control socket; returns the status and the body.
fn curl(fixture: &Fixture, arguments: &[&str]) -> (u32, String) {
    let socket = fixture.path("control").display().to_string();
    let how = ["-sS", "--unix-socket", &socket, "-w", "\n%{http_code}"];
    let said = run_tool("curl", &[&how, arguments].concat());
    let (body, status) = said.rsplit_once('\n').expect("the status is on a line of its own");
    (status.parse().expect("a number"), body.to_owned())
}

fn patch(fixture: &Fixture, body: &str) -> (u32, String) {
    let json = "content-type: application/json";
    curl(fixture, &["-X", "PATCH", "-H", json, "-d", body, GET])
}

#[test]
fn control_socket_reports_changes_and_detaches() {
    let mut fixture = Fixture::new();
    let mut pager = fixture.start();
    let (status, said) = curl(&fixture, &[GET]);
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((status, &told["size"]), (200, &(64 * MIB).into()));
    let (status, said) = patch(&fixture, "{\"budget\": 41943040}");
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((status, &told["budget"], &told["compressed"]["limit"]), (200, &(40 * MIB).into(), &(20 * MIB).into()));
    for (body, code, why) in [
        ("", 400, "{\"budget\":1073741824}"),
        ("{\"budget\": -1}", 400, "-1"),
        ("{\"budget\": \"much\"}", 400, "much"),
        ("{\"budgett\": 41943040}", 400, "budgett"),
        ("[", 400, "{\"budget\":1073741824}"),
        ("{\"budget\": 1}", 409, "a budget of 1 B is too small"),
        ("{\"budget\": 41943040, \"compressed\": 41943040}", 409, "leave too little of a budget of"),
        ("{\"budget\": 18446744073709551615}", 200, ""),
        ("{\"compressed\": 18446744073709551615}", 409, "leave too little of a budget of"),
        ("{\"budget\": 41943040, \"compressed\": 0}", 200, ""),
        ("{\"range\": {\"least\": 1}}", 400, "least"),
        ("{\"range\": {\"min\": [1]}}", 400, "list"),
        ("{\"range\": {\"min\": 31457280, \"low\": 20971520}}", 409, "min of 30 MiB is above its low of 20 MiB"),
        ("{\"range\": {\"min\": 50331648}}", 409, "a budget of 40 MiB is below its min of 48 MiB"),
        ("{\"range\": {\"min\": 20971520}}", 200, "{\"min\":20971520}"),
        ("{\"range\": {}}", 200, "\"range\":null"),
        ("{}", 200, ""),
    ] {
        let (status, said) = patch(&fixture, body);
        assert_eq!(status, code, "{body}: {said}");
        let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let told = said.to_string().replace("\\\"", "\"");
        assert!(told.contains(why), "{body}: {told}");
    }
    assert_eq!(pager.state().expect("answers").budget, 40 * MIB);
    for (arguments, code) in [
        (&["-X", "DELETE", GET][..], 405),
        (&[DETACH], 405),
        (&["http://x/v1/memory/nothing"], 404),
        (&["-X", "POST", "http://x/v1/reload"], 409),
    ] {
        let (status, said) = curl(&fixture, arguments);
        assert_eq!(status, code, "{arguments:?}: {said}");
    }
    fixture.works();
    let (status, said) = curl(&fixture, &["-X", "POST", DETACH]);
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((status, &told["detached"]), (200, &true.into()));
    assert!(pager.process.wait(crate::support::TEST_TIMEOUT).expect("ends").success());
    fixture.works();
    fixture.verify();
}
