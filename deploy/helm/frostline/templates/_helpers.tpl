{{- define "frostline.labels" -}}
app.kubernetes.io/name: frostline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "frostline.account" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- end }}

{{/* With tenants /v1/health wants a token, which a probe has not; the description is for everybody. */}}
{{- define "frostline.probe" -}}
{{- if .Values.tls.clients }}
{{- /* The cluster's own probes have no certificate: the node's own is the client's. */}}
exec:
  command:
    {{- include "frostline.healthy" . | nindent 4 }}
    - {{ printf "https://127.0.0.1:%v/v1/health" .Values.port | quote }}
    - /etc/frostline/server/tls.crt
    - /etc/frostline/server/tls.key
{{- else }}
httpGet:
  path: {{ if .Values.open }}/v1/health{{ else }}/v1/openapi.json{{ end }}
  port: http
  scheme: {{ if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}
{{- end }}

{{- define "frostline.healthy" -}}
- python
- "-I"
- /opt/frostline/healthy.py
{{- end }}
